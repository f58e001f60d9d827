-- Dead letters, and sending what would be one otherwise: a letter that is replayed, or an event that a finished run
-- leaves to its topic.
--
-- What is sent to another slice leaves its own at once, as a post. There it is sent or, if that is refused, kept as a
-- letter: it never is in two places. `sent` remembers what became of each, so that a post which comes twice changes
-- nothing, and who asked can be told.

-- Letters are in the order in which they came: by the server's clock, never backwards within a slice.

local function next_in_order()
  local time = call('TIME')
  local last = call('ZRANGE', key('letter-order'), -1, -1, 'WITHSCORES')
  local at = time[1] * 1000000 + time[2]
  if last[2] and tonumber(last[2]) >= at then at = tonumber(last[2]) + 1 end
  return string.format('%.0f', at)
end

-- {id, blob} each, or {id, blob, place} for one that comes back to its place in the order.
function letters.keep(kept)
  for _, letter in ipairs(kept) do
    if call('HSETNX', key('letters'), letter[1], letter[2]) == 1 then
      call('ZADD', key('letter-order'), letter[3] or next_in_order(), letter[1])
    end
  end
end

function letters.remove(id)
  call('ZREM', key('letter-order'), id)
  return call('HDEL', key('letters'), id)
end

local SENT = {delivered = true, published = true}

-- A letter is {id, blob, its place in the order}; the last only if it had one.
function letters.send(message)
  local _, name, now, inner, letter = unpack(message)
  local known = call('HGET', key('sent'), name)
  if known then return cmsgpack.unpack(known) end
  local answer = writes[inner[1]](inner)
  call('HSET', key('sent'), name, cmsgpack.pack(answer))
  call('ZADD', key('sent-since'), now, cmsgpack.pack({name}))
  if not SENT[answer[1]] then letters.keep({letter}) end
  return answer
end

-- Answers 'sent' if it is on its way to another slice.
function letters.replay(write)
  local _, id, name, now, slice, inner = unpack(write)
  local blob = call('HGET', key('letters'), id)
  if not blob then
    local known = call('HGET', key('sent'), name)
    return known and cmsgpack.unpack(known) or {'gone'}
  end
  local message = {'send', name, now, inner, {id, blob, call('ZSCORE', key('letter-order'), id)}}
  if slice ~= SLICE then
    letters.remove(id)
    posts.add(slice, message)
    return {'sent'}
  end
  local answer = letters.send(message)
  if SENT[answer[1]] then letters.remove(id) end
  return answer
end
