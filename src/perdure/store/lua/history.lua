-- Adding to the history of a run, which is all that most turns do.

-- Answers that say yes or no only are numbers. The rest are arrays: a word, and what belongs to it.
local COMMITTED = 0 -- and one more if there is mail that the turn has not seen
local CREATED = 2 -- and one more if it is owned

-- Whether mail is left that a turn did not know of; `held`: only such as wakes a held run. By this the race between a
-- send and a suspension is decided, and cannot be lost: both are calls in the slice of the run, so that one is first.
-- Mail that comes before the turn is found here and leaves the run due; mail that comes after it finds the run
-- suspended and makes it due (`mail.add`).
local function unseen(row, seen, held)
  if tonumber(row.inbox_last) <= seen then return false end
  local name = key('mail', row.id)
  for _, number in ipairs(call('HKEYS', name)) do
    if tonumber(number) > seen then
      if not held then return true end
      if WAKES_HELD[header_of(call('HGET', name, number))[1]] then return true end
    end
  end
  return false
end

local function committed(row, seen)
  return COMMITTED + (unseen(row, seen) and 1 or 0)
end

local function row_has_turn(id, position, turn_id)
  local found = call('HGET', ENTRIES .. id, position)
  return found and header_of(found)[1] == turn_id
end

local function refusal(row_status, owner, write_owner, owned)
  if TERMINAL[row_status] then return {'ended', row_status} end
  if not alive(write_owner) then return {'superseded'} end
  if owner ~= write_owner and (owned or owner ~= '') then return {'superseded'} end
end

-- The answer to a turn that is refused, or has been here before; nothing if it may go on.
local function judged(row, write)
  local _, id, base, turn_id, worker, owned, seen = unpack(write)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and row_has_turn(id, base + 1, turn_id) then return committed(row, seen) end
  local refused = refusal(row.status, row.owner, worker, owned)
  if refused then return refused end
  if position ~= base then return {'superseded'} end
end

-- A turn that does no more than add rows: position, value, position, value ...
local function step(write)
  local id, seen, added = write[2], write[7], write[8]
  local row = rows.glance(id)
  local answer = judged(row, write)
  if answer then return answer end
  set_all(ENTRIES .. id, added)
  if row.mailed == '1' and not unseen(row, seen) then rows.change(rows.read(id), {wake_at = '', mailed = '0'}) end
  return committed(row, seen)
end
