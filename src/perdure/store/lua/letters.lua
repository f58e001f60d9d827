-- Sending what would be a dead letter otherwise: one that is replayed, or an event that a finished run leaves to its
-- topic.
--
-- What is sent to another slice leaves its own at once, as a post. There it is sent or, if that is refused, kept as a
-- letter: it never is in two places. `sent` remembers what became of each, so that a post which comes twice changes
-- nothing, and who asked can be told.

local SENT = {delivered = true, published = true}

-- A letter is {id, blob, its place in the order}; the last only if it had one.
handlers.send = function(message)
  local _, name, now, inner, letter = unpack(message)
  local known = call('HGET', key('sent'), name)
  if known then return cmsgpack.unpack(known) end
  local answer = writes[inner[1]](inner)
  call('HSET', key('sent'), name, cmsgpack.pack(answer))
  call('ZADD', key('sent-since'), now, cmsgpack.pack({name}))
  if not SENT[answer[1]] then keep_letters({letter}) end
  return answer
end

-- Answers 'sent' if it is on its way to another slice.
writes.replay = function(write)
  local _, id, name, now, slice, inner = unpack(write)
  local blob = call('HGET', key('letters'), id)
  if not blob then
    local known = call('HGET', key('sent'), name)
    return known and cmsgpack.unpack(known) or {'gone'}
  end
  local message = {'send', name, now, inner, {id, blob, call('ZSCORE', key('letter-order'), id)}}
  if slice ~= SLICE then
    remove_letter(id)
    post(slice, message)
    return {'sent'}
  end
  local answer = handlers.send(message)
  if SENT[answer[1]] then remove_letter(id) end
  return answer
end
