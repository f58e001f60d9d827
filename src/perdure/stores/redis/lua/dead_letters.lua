-- Module `dead_letters`: stores dead letters, replays them, and sends events that become dead letters if refused.
--
-- A replayed dead letter, or an event that an ended run redirects to its topic, may be for another partition. It leaves
-- its own partition at once, as a partition message. The other partition sends it or, if that is refused, stores it as
-- a dead letter, so that it never exists twice. `sent` remembers each result: a message that is delivered twice changes
-- nothing, and the caller can read the result.
-- Keys: dead-letters (hash: id -> record), dead-letter-order (sorted set), sent (hash: name -> result), sent-since
-- (sorted set of names by time).

-- Return the next score of the order: the server's clock, never backwards within a partition.
local function next_score()
  local time = call('TIME')
  local last = call('ZRANGE', key('dead-letter-order'), -1, -1, 'WITHSCORES')
  local score = time[1] * 1000000 + time[2]
  if last[2] and tonumber(last[2]) >= score then score = tonumber(last[2]) + 1 end
  return string.format('%.0f', score)
end

-- Store dead letters: {id, record} each, or {id, record, score} for one that returns to its old position in the order.
function dead_letters.add(added)
  for _, dead_letter in ipairs(added) do
    if call('HSETNX', key('dead-letters'), dead_letter[1], dead_letter[2]) == 1 then
      call('ZADD', key('dead-letter-order'), dead_letter[3] or next_score(), dead_letter[1])
    end
  end
end

function dead_letters.remove(id)
  call('ZREM', key('dead-letter-order'), id)
  return call('HDEL', key('dead-letters'), id)
end

local ACCEPTED = {delivered = true, published = true}

-- Apply the inner write, or store the dead letter {id, record, score (if it had one)} if the write is refused.
function dead_letters.send(message)
  local _, name, now, inner, dead_letter = unpack(message)
  local known = call('HGET', key('sent'), name)
  if known then return cmsgpack.unpack(known) end
  local result = other_writes[inner[1]](inner)
  call('HSET', key('sent'), name, cmsgpack.pack(result))
  call('ZADD', key('sent-since'), now, cmsgpack.pack({name}))
  if not ACCEPTED[result[1]] then dead_letters.add({dead_letter}) end
  return result
end

-- Replay a dead letter. Returns 'sent' if the event is on its way to another partition.
function dead_letters.replay(write)
  local _, id, name, now, partition, inner = unpack(write)
  local blob = call('HGET', key('dead-letters'), id)
  if not blob then
    local known = call('HGET', key('sent'), name)
    return known and cmsgpack.unpack(known) or {'dead_letter_missing'}
  end
  local message = {'send', name, now, inner, {id, blob, call('ZSCORE', key('dead-letter-order'), id)}}
  if partition ~= PARTITION then
    dead_letters.remove(id)
    outbox.add(partition, message)
    return {'sent'}
  end
  local result = dead_letters.send(message)
  if ACCEPTED[result[1]] then dead_letters.remove(id) end
  return result
end
