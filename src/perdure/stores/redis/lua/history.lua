-- Module `history`: checks whether a turn may add to the history of a run, and drops entries.
--
-- Keys: entries:<run> (hash: position -> framed entry; header {turn id, location, is marker}), inbox:<run> (read only).
-- The rule numbers below are those of the acceptance rule of a turn (`stores/protocol.py`).

-- Return whether the inbox has messages that the turn has not seen; `held`: only messages that wake a held run count.
-- This check decides the race between a send and a suspension. Both are calls in the partition of the run, so one is
-- first. A message that comes before the turn is found here and makes the run due. A message that comes after the turn
-- finds the run suspended and makes it due itself (`inbox.add`).
function history.has_messages(row, seen, held)
  if tonumber(row.last_message_no) <= seen then return false end
  local name = key('inbox', row.id)
  for _, number in ipairs(call('HKEYS', name)) do
    if tonumber(number) > seen then
      if not held then return true end
      if inbox.WAKES_HELD[read_header(call('HGET', name, number))[1]] then return true end
    end
  end
  return false
end

function history.committed_result(row, seen)
  return COMMITTED + (history.has_messages(row, seen) and 1 or 0)
end

function history.has_turn(id, position, turn_id)
  local found = call('HGET', ENTRIES .. id, position)
  return found and read_header(found)[1] == turn_id
end

-- Return why this worker may not write to the run (rules 3 to 5), or nil. `owned`: the write claims to own the run.
function history.check_worker(status, owner, worker, owned)
  if TERMINAL[status] then return {'ended', status} end -- rule 3
  if not is_alive(worker) then return {'superseded'} end -- rule 4
  if owner ~= worker and (owned or owner ~= '') then return {'superseded'} end -- rule 5
end

-- Return the result of a turn that is rejected or was committed before, or nil if it is to be applied (rule 7).
function history.check_turn(row, write)
  local _, id, base, turn_id, worker, owned, seen = unpack(write)
  if not row then return {'missing'} end -- rule 1
  local position = run_rows.position(row)
  if position > base and history.has_turn(id, base + 1, turn_id) then -- rule 2
    return history.committed_result(row, seen)
  end
  local refused = history.check_worker(row.status, row.owner, worker, owned) -- rules 3 to 5
  if refused then return refused end
  if not owned and row.owner == '' and call('HGET', RUN .. id, 'place') == 'waiting' then return {'superseded'} end -- rule 5
  if position ~= base then return {'superseded'} end -- rule 6
end

-- Delete the entries at these locations (`below`: and all entries beneath them), and every marker.
function history.drop_entries(id, locations, below)
  local name, wanted = ENTRIES .. id, {}
  for _, location in ipairs(locations) do wanted[location] = true end
  local found = call('HGETALL', name)
  for i = 1, #found, 2 do
    local _, location, marker = unpack(read_header(found[i + 1]))
    local drop = marker or wanted[location]
    local slash = below and not drop and string.find(location, '/', 1, true)
    while slash and not drop do
      drop = wanted[string.sub(location, 1, slash - 1)]
      slash = string.find(location, '/', slash + 1, true)
    end
    if drop then call('HDEL', name, found[i]) end
  end
end
