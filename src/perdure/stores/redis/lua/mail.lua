-- Mail of runs, and their subscriptions.

mail.COUNTED = {event = true, assignment = true} -- has a limit, and somebody must deal with it when its run ends
mail.WAKES_HELD = {resume = true, cancel = true}

-- The opposite of `header_of`.
local function framed(header, blob)
  local packed = cmsgpack.pack(header)
  return struct.pack('>I4', #packed) .. packed .. blob
end

-- A held run stays asleep, and one that has yet to begin, for the first time or anew, waits for its time.
local function wakes(row, kind)
  return (row.held_kind == '' and row.first_executed_at ~= '') or row.owner ~= '' or mail.WAKES_HELD[kind]
end

-- Put a message that is fresh into the inbox; answers its number.
function mail.add(row, message_id, kind, value, now)
  local number = tonumber(row.last_message_no) + 1
  call('HSET', key('mail', row.id), number, value)
  call('HSET', key('message-numbers', row.id), message_id, number)
  local fields = {last_message_no = number}
  if mail.COUNTED[kind] then fields.pending = tonumber(row.pending) + 1 end
  if wakes(row, kind) then
    local sooner = row.wake_at == '' or tonumber(row.wake_at) > tonumber(now)
    local mailed = row.owner ~= '' and '1' or '0'
    if sooner or row.mailed ~= mailed then -- else it has been woken before
      rows.change(row, {wake_at = sooner and now or row.wake_at, mailed = mailed})
    end
  end
  rows.note(row, fields)
  tell(row.id)
  return number
end

-- Take a message out of the inbox: for good (an event's id is remembered), or as an assignment that goes back. Whether
-- it was there.
local function take_out(row, number, now, verb)
  local name = key('mail', row.id)
  local value = call('HGET', name, number)
  if not value then return false end
  local kind, message_id, topic, slice, place, serial = unpack(header_of(value))
  if verb == 'returned' and kind ~= 'assignment' then return false end
  call('HDEL', name, number)
  if mail.COUNTED[kind] then
    row.pending = tostring(tonumber(row.pending) - 1)
    call('HSET', RUN .. row.id, 'pending', row.pending)
  end
  if verb == 'returned' then
    call('HDEL', key('message-numbers', row.id), message_id)
  elseif kind == 'event' then
    call('ZADD', key('consumed'), now, cmsgpack.pack({row.id, message_id}))
  end
  if kind == 'assignment' then posts.add(slice, {verb, topic, place, serial, row.id, now}) end
  return true
end

function mail.consume(row, numbers, now)
  for _, number in ipairs(numbers) do take_out(row, number, now, 'consumed') end
end

function mail.give_back(row, numbers, now)
  for _, number in ipairs(numbers) do take_out(row, number, now, 'returned') end
end

-- Unread events of a run that has ended go to their topics: {number, slice, name, publish, letter} each.
function mail.move(row, moved, now)
  for _, given in ipairs(moved) do
    local number, slice, name, publish, letter = unpack(given)
    if take_out(row, number, now, 'consumed') then posts.add(slice, {'send', name, now, publish, letter}) end
  end
end

-- Subscriptions of a run, as far as it knows them: target -> its topics, by slice: {slice, topic ...} ...

function mail.unsubscribe(row, target)
  local name = key('subscriptions', row.id)
  local found = call('HGET', name, target)
  if not found then return end
  call('HDEL', name, target)
  for _, group in ipairs(cmsgpack.unpack(found)) do
    posts.add(group[1], {'unsubscribe', group, row.id, SLICE, target, row.created_at})
  end
end

function mail.unsubscribe_all(row)
  for _, target in ipairs(call('HKEYS', key('subscriptions', row.id))) do mail.unsubscribe(row, target) end
end

-- One that stands already keeps its standing.
function mail.subscribe(row, subscriptions, now)
  for _, given in ipairs(subscriptions) do
    local target, groups = given[1], given[2]
    if call('HSETNX', key('subscriptions', row.id), target, cmsgpack.pack(groups)) == 1 then
      for _, group in ipairs(groups) do
        posts.add(group[1], {'subscribe', group, row.id, SLICE, target, row.created_at, now})
      end
    end
  end
end

-- A topic gives an event to a receive. One that is not open any more sends it back; by serials a post that comes twice
-- is known.
function mail.assign(message)
  local _, id, target, topic, slice, place, serial, body, sender, sent, expires, now, own = unpack(message)
  local message_id = 'topic/' .. topic .. '/' .. place
  local last = string.match(call('HGET', key('serials', id), message_id) or '0', '^%d+')
  if tonumber(last) >= serial then return end
  local row = rows.read(id)
  local open = row and not TERMINAL[row.status] and call('HEXISTS', key('subscriptions', id), target) == 1
  if not open then
    posts.add(slice, {'returned', topic, place, serial, id, now})
    return
  end
  call('HSET', key('serials', id), message_id, serial .. ':' .. slice)
  mail.unsubscribe(row, target)
  local header = {'assignment', message_id, topic, slice, place, serial, target, sender, sent, expires, own}
  mail.add(row, message_id, 'assignment', framed(header, body), now)
end

-- The messages of a run that is rewound, unread again under their old numbers: {number, id, kind, value, body} each.
function mail.take_again(row, messages, now)
  for _, given in ipairs(messages) do
    local number, message_id, kind, value, body = unpack(given)
    local topic, place = string.match(message_id, '^topic/(.*)/(%d+)$')
    local serial, slice = string.match(call('HGET', key('serials', row.id), message_id) or '', '^(%d+):(%d+)$')
    if kind == 'assignment' and topic and serial then
      serial, slice, place = tonumber(serial), tonumber(slice), tonumber(place)
      local header = header_of(value)
      header[4], header[6] = slice, serial
      value = framed(header, body)
      posts.add(slice, {'retaken', topic, place, serial, row.id, body})
    end
    call('ZREM', key('consumed'), cmsgpack.pack({row.id, message_id}))
    call('HSET', key('message-numbers', row.id), message_id, number)
    if call('HSET', key('mail', row.id), number, value) == 1 and mail.COUNTED[kind] then
      row.pending = tostring(tonumber(row.pending) + 1)
      call('HSET', RUN .. row.id, 'pending', row.pending)
    end
  end
end

-- A run that is forgotten has seen nothing.
function mail.forget(id)
  local found = call('HGETALL', key('serials', id))
  for i = 1, #found, 2 do
    local topic, place = string.match(found[i], '^topic/(.*)/(%d+)$')
    posts.add(tonumber(string.match(found[i + 1], ':(%d+)$')), {'forget', topic, tonumber(place), id})
  end
  call('DEL', key('serials', id), key('mail', id), key('message-numbers', id), key('subscriptions', id))
end
