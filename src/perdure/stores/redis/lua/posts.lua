-- Posts: what a slice has to tell another one about topics.
--
-- One to this very slice is handled before the write is answered. One to another slice is kept in this slice's outbox
-- until whoever made the call, or a later sweep, has handed it over; every handler knows one that comes twice.

function posts.add(slice, message)
  if slice == SLICE then
    posted[#posted + 1] = message
    return
  end
  local number = call('INCR', key('outbox-last'))
  local sent = message[1] == 'assign' and message[10] or ''
  local packed = slice .. ':' .. sent .. ':' .. cmsgpack.pack(message)
  call('HSET', key('outbox'), number, packed)
  outgoing[#outgoing + 1] = {tostring(number), packed}
end

-- `assign` is for a run, `send` for whoever it names, all others are for a topic.
function posts.handle(message)
  local verb = message[1]
  local handlers = verb == 'assign' and mail or verb == 'send' and letters or topics
  handlers[verb](message)
end

function posts.handle_all()
  local at = 1
  while at <= #posted do -- handlers may post more
    posts.handle(posted[at])
    at = at + 1
  end
  posted = {}
end
