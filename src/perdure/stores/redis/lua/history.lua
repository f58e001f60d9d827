-- The history of a run: who may add to it, and whether a turn has been here before.

-- Whether mail is left that a turn did not know of; `held`: only such as wakes a held run. By this the race between a
-- send and a suspension is decided, and cannot be lost: both are calls in the slice of the run, so that one is first.
-- Mail that comes before the turn is found here and leaves the run due; mail that comes after it finds the run
-- suspended and makes it due (`mail.add`).
function history.unseen(row, seen, held)
  if tonumber(row.last_message_no) <= seen then return false end
  local name = key('mail', row.id)
  for _, number in ipairs(call('HKEYS', name)) do
    if tonumber(number) > seen then
      if not held then return true end
      if mail.WAKES_HELD[header_of(call('HGET', name, number))[1]] then return true end
    end
  end
  return false
end

function history.committed(row, seen)
  return COMMITTED + (history.unseen(row, seen) and 1 or 0)
end

function history.has_turn(id, position, turn_id)
  local found = call('HGET', ENTRIES .. id, position)
  return found and header_of(found)[1] == turn_id
end

function history.refusal(row_status, owner, write_owner, owned)
  if TERMINAL[row_status] then return {'ended', row_status} end
  if not alive(write_owner) then return {'superseded'} end
  if owner ~= write_owner and (owned or owner ~= '') then return {'superseded'} end
end

-- The answer to a turn that is refused, or has been here before; nothing if it may go on.
function history.judged(row, write)
  local _, id, base, turn_id, worker, owned, seen = unpack(write)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and history.has_turn(id, base + 1, turn_id) then return history.committed(row, seen) end
  local refused = history.refusal(row.status, row.owner, worker, owned)
  if refused then return refused end
  if position ~= base then return {'superseded'} end
end

-- Delete the rows of these locations (`below`: and of all beneath them) and every marker.
function history.drop(id, locations, below)
  local name, wanted = ENTRIES .. id, {}
  for _, location in ipairs(locations) do wanted[location] = true end
  local found = call('HGETALL', name)
  for i = 1, #found, 2 do
    local _, location, marker = unpack(header_of(found[i + 1]))
    local goes = marker or wanted[location]
    local slash = below and not goes and string.find(location, '/', 1, true)
    while slash and not goes do
      goes = wanted[string.sub(location, 1, slash - 1)]
      slash = string.find(location, '/', slash + 1, true)
    end
    if goes then call('HDEL', name, found[i]) end
  end
end
