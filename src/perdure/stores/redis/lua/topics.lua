-- Topics: events in their places, who waits for them, and who has been given which.
--
-- An event is queued as `free` (one run may take it) or `shared` (every run may see it once); one that is assigned, or
-- only for those who stood when it came, is in neither. `fan` is set while it is unfinished: the number of the last
-- waiter that it was offered to. `h:<run>` is the serial of an assignment that is neither consumed nor returned. What
-- is `gone` is kept without its body until its id may be forgotten.
--
-- Why an event and a run that waits for it cannot miss each other: a publish and a subscription are calls in the slice
-- of the topic, so that one is first, and leaves behind what the other looks for: a queued event or a place in line.
-- A receive that is given up sends word of it and of what it returns from its own slice, by posts that are kept until
-- they are taken; an assignment that crosses them on its way meets no open receive, and comes back.

local KEPT_FIELDS = 9
local EVENT_FIELDS = {'id', 'delivery', 'consume', 'sent', 'expires', 'sender', 'bound', 'body', 'fan', 'gone', 'own'}

local function expired(expires_at, now)
  return expires_at ~= '' and tonumber(expires_at) <= tonumber(now)
end

function topics.event_key(topic, place) return key('event', topic, place) end

function topics.read_event(topic, place)
  local found = call('HMGET', topics.event_key(topic, place), unpack(EVENT_FIELDS))
  if not found[1] or found[10] then return nil end
  return {
    topic = topic, place = tonumber(place), id = found[1], delivery = found[2], lasting = found[2] ~= 'after_wait',
    consume = found[3] == '1', sent = found[4], expires = found[5], sender = found[6], bound = tonumber(found[7]),
    body = found[8], fan = found[9] and tonumber(found[9]), own = found[11],
  }
end

-- Whether it waits for readers who come later. What expires has its moment noted there too.
local function enqueue(event)
  call('ZADD', key(event.consume and 'free' or 'shared', event.topic), event.place, event.place)
  if event.expires ~= '' then call('ZADD', key('queued-until', event.topic), event.expires, event.place) end
end

local function dequeue(event)
  call('ZREM', key(event.consume and 'free' or 'shared', event.topic), event.place)
  call('ZREM', key('queued-until', event.topic), event.place)
end

local function set_fan(event, fan)
  local unfinished = key('unfinished', event.topic)
  event.fan = fan
  if fan then
    call('HSET', topics.event_key(event.topic, event.place), 'fan', fan)
    call('ZADD', unfinished, event.place, event.place)
    call('ZADD', key('unfinished-topics'), 0, event.topic)
  else
    call('HDEL', topics.event_key(event.topic, event.place), 'fan')
    call('ZREM', unfinished, event.place)
    if call('EXISTS', unfinished) == 0 then call('ZREM', key('unfinished-topics'), event.topic) end
  end
end

function topics.leave(event, now)
  dequeue(event)
  set_fan(event, nil)
  call('HDEL', topics.event_key(event.topic, event.place), 'body')
  call('HSET', topics.event_key(event.topic, event.place), 'gone', now)
  call('DEL', key('seen', event.topic, event.place))
  call('ZREM', key('events', event.topic), event.place)
  call('ZREM', key('expiring'), cmsgpack.pack({event.topic, event.place}))
  call('ZADD', key('event-tombs'), now, cmsgpack.pack({event.topic, event.place}))
  if call('EXISTS', key('shared', event.topic)) == 0 then call('DEL', key('cursors', event.topic)) end
end

-- Whether somebody has it, and neither consumed nor returned it: then it has more fields than `keep_event` gave it. (What
-- is unfinished or gone has others, and is not asked about.) To read them all would be to read all who have it.
local function outstanding(event)
  return call('HLEN', topics.event_key(event.topic, event.place)) > KEPT_FIELDS
end

-- What those who come later may not have is gone once nobody has it before them.
local function leave_if_over(event, now)
  if not event.lasting and not event.fan and not outstanding(event) then topics.leave(event, now) end
end

local function may_have(event, run, created)
  if event.delivery == 'after_create' and tonumber(created) > tonumber(event.sent) then return false end
  return event.consume or call('SISMEMBER', key('seen', event.topic, event.place), run) == 0
end

-- Give the event to a waiter: {run, slice, target, created_at}.
local function assign(event, waiter, now)
  local topic, place = event.topic, event.place
  local serial = call('HINCRBY', key('topic', topic), 'serial', 1)
  call('ZREM', key('waiting', topic), cmsgpack.pack(waiter))
  call('HSET', topics.event_key(topic, place), 'h:' .. waiter[1], serial)
  if event.consume then
    dequeue(event)
    set_fan(event, nil)
  else
    call('SADD', key('seen', topic, place), waiter[1])
  end
  posts.add(waiter[2], {
    'assign', waiter[1], waiter[3], topic, SLICE, place, serial,
    event.body, event.sender, event.sent, event.expires, now, event.own,
  })
end

-- Those who wait, in the order in which they came, with a number above `after`, until `visit` answers true.
local function each_waiter(topic, after, bound, visit)
  local size = 100
  while true do
    local page = call('ZRANGEBYSCORE', key('waiting', topic), '(' .. after, bound, 'WITHSCORES', 'LIMIT', 0, size)
    for i = 1, #page, 2 do
      after = page[i + 1]
      if visit(cmsgpack.unpack(page[i]), tonumber(after)) then return end
    end
    if #page < 2 * size then return end
  end
end

-- The waiter who is next in line for the event; `run`: only its own waiters.
local function first_in_line(event, run)
  local found
  each_waiter(event.topic, 0, event.lasting and '+inf' or event.bound, function(waiter)
    if (not run or waiter[1] == run) and may_have(event, waiter[1], waiter[4]) then found = waiter end
    return found ~= nil
  end)
  return found
end

local function finish(event, now)
  set_fan(event, nil)
  local waiter = event.consume and event.lasting and first_in_line(event) -- somebody who came since
  if waiter then
    assign(event, waiter, now)
    return 1
  end
  leave_if_over(event, now)
  return 0
end

-- Offer the event to the next page of those who stood when it came; how many got it.
local function offer_page(event, now, page)
  if expired(event.expires, now) then
    topics.leave(event, now)
    return 0
  end
  local woken, visited, last = 0, 0, event.fan
  each_waiter(event.topic, event.fan, event.bound, function(waiter, number)
    if visited == page then return true end
    visited, last = visited + 1, number
    if may_have(event, waiter[1], waiter[4]) then
      assign(event, waiter, now)
      woken = woken + 1
      return event.consume
    end
  end)
  if event.consume and woken == 1 then return 1 end
  if call('ZCOUNT', key('waiting', event.topic), '(' .. last, event.bound) > 0 then
    set_fan(event, last)
    return woken
  end
  return woken + finish(event, now)
end

-- How many events wait in the topic, if another one could not wait there too. What has expired takes no room.
local function pending_if_full(topic, limit, now)
  if limit < 0 then return nil end
  local queued = call('ZCARD', key('free', topic)) + call('ZCARD', key('shared', topic))
  if queued >= limit then queued = queued - call('ZCOUNT', key('queued-until', topic), '-inf', now) end
  return queued >= limit and queued or nil
end

-- What is kept of every event: KEPT_FIELDS.
local function keep_event(event)
  local topic, place = event.topic, event.place
  call('HSET', topics.event_key(topic, place), 'id', event.id, 'delivery', event.delivery, 'sent', event.sent,
    'consume', event.consume and '1' or '0', 'expires', event.expires, 'sender', event.sender, 'bound', event.bound,
    'body', event.body, 'own', event.own)
  call('HSET', key('event-ids', topic), event.id, place)
  call('ZADD', key('events', topic), place, place)
  if event.expires ~= '' then call('ZADD', key('expiring'), event.expires, cmsgpack.pack({topic, place})) end
  if event.lasting then enqueue(event) end
end

function topics.publish(write)
  local _, topic, id, delivery, consume, sent, expires, sender, body, now, limit, page, own = unpack(write)
  local known = call('HGET', key('event-ids', topic), id)
  if known then return {'published', tonumber(known), 0, call('HEXISTS', topics.event_key(topic, known), 'fan'), 0} end
  local event = {
    topic = topic, id = id, delivery = delivery, lasting = delivery ~= 'after_wait', consume = consume, sent = sent,
    expires = expires, sender = sender, body = body, own = own,
    bound = tonumber(call('HGET', key('topic', topic), 'waiter') or '0'),
  }
  local earlier = call('EXISTS', key('unfinished', topic)) == 1
  if event.lasting and not expired(expires, now) then
    local pending = pending_if_full(topic, limit, now)
    if pending and (earlier or not consume or not first_in_line(event)) then return {'full', pending} end
  end
  event.place = call('HINCRBY', key('topic', topic), 'place', 1)
  keep_event(event)
  set_fan(event, 0)
  if earlier and not expired(expires, now) then return {'published', event.place, 0, 1, 1} end
  local woken = offer_page(event, now, page)
  return {'published', event.place, woken, event.fan and 1 or 0, 1}
end

-- The page is that of the earliest event of the topic that is unfinished.
function topics.fan_out(write)
  local _, topic, place, now, page = unpack(write)
  local asked = topics.read_event(topic, place)
  if not asked or not asked.fan then return {'published', place, 0, 0, 1} end
  local first = topics.read_event(topic, call('ZRANGE', key('unfinished', topic), 0, 0)[1])
  local woken = offer_page(first, now, page)
  if first.place ~= asked.place then return {'published', place, 0, 1, 1} end
  return {'published', place, woken, first.fan and 1 or 0, 1}
end

-- The first queued event of a kind that this run may have, and how far it had to look.
local function first_queued(topic, kind, after, run, created, now)
  local size, last = 50, after
  while true do
    local page = call('ZRANGEBYSCORE', key(kind, topic), '(' .. last, '+inf', 'LIMIT', 0, size)
    for _, place in ipairs(page) do
      local event = topics.read_event(topic, place)
      local turn_has_come = not (event.consume and event.fan) -- those who stand in line come first
      if turn_has_come and not expired(event.expires, now) and may_have(event, run, created) then return event, last end
      last = place
    end
    if #page < size then return nil, last end
  end
end

local function first_of_topic(topic, run, created, now)
  local free = first_queued(topic, 'free', 0, run, created, now)
  -- What a run has seen once it will not see again: it need not look at that every time.
  local cursors = key('cursors', topic)
  local cursor = call('HGET', cursors, run) or '0'
  local shared, last = first_queued(topic, 'shared', cursor, run, created, now)
  if last ~= cursor then call('HSET', cursors, run, last) end
  if shared and free then return shared.place < free.place and shared or free end
  return shared or free
end

-- Of several topics the event that was sent first is taken; if there is none the run stands in line in all of them.
function topics.subscribe(message)
  local _, group, run, slice, target, created, now = unpack(message)
  local waiter, found = {run, slice, target, created}, nil
  local member = cmsgpack.pack(waiter)
  for i = 2, #group do
    if call('ZSCORE', key('waiting', group[i]), member) then return end
    local event = first_of_topic(group[i], run, created, now)
    if event and (not found or tonumber(event.sent) < tonumber(found.sent)) then found = event end
  end
  if found then
    assign(found, waiter, now)
    return
  end
  for i = 2, #group do
    local number = call('HINCRBY', key('topic', group[i]), 'waiter', 1)
    call('ZADD', key('waiting', group[i]), number, member)
  end
end

function topics.unsubscribe(message)
  local _, group, run, slice, target, created = unpack(message)
  local member = cmsgpack.pack({run, slice, target, created})
  for i = 2, #group do call('ZREM', key('waiting', group[i]), member) end
end

local function close_assignment(message)
  local _, topic, place, serial, run = unpack(message)
  local name, holder = topics.event_key(topic, place), 'h:' .. run
  if tonumber(call('HGET', name, holder) or '-1') ~= serial then return nil end
  call('HDEL', name, holder)
  return topics.read_event(topic, place)
end

function topics.consumed(message)
  local event, now = close_assignment(message), message[6]
  if not event then return end
  if event.consume then topics.leave(event, now) else leave_if_over(event, now) end
end

local function unsee(event, run)
  call('SREM', key('seen', event.topic, event.place), run)
  local cursor = call('HGET', key('cursors', event.topic), run)
  if cursor and tonumber(cursor) >= event.place then
    call('HSET', key('cursors', event.topic), run, event.place - 1)
  end
end

function topics.returned(message)
  local event, run, now = close_assignment(message), message[5], message[6]
  if not event then return end
  if not event.consume then unsee(event, run) end
  if expired(event.expires, now) then
    topics.leave(event, now)
    return
  end
  local waiter = first_in_line(event, not event.consume and run)
  if waiter then
    assign(event, waiter, now)
  elseif event.consume and event.lasting then
    enqueue(event)
  else
    leave_if_over(event, now)
  end
end

-- A run that was rewound has not read this assignment after all: an event that was gone by it is back.
function topics.retaken(message)
  local _, topic, place, serial, run, body = unpack(message)
  local name = topics.event_key(topic, place)
  local found = call('HMGET', name, 'gone', 'consume', 'expires')
  if not found[2] then return end
  if found[1] then
    if found[2] == '0' then return end
    local at = cmsgpack.pack({topic, place})
    call('HDEL', name, 'gone')
    call('HSET', name, 'body', body)
    call('ZREM', key('event-tombs'), at)
    call('ZADD', key('events', topic), place, place)
    if found[3] ~= '' then call('ZADD', key('expiring'), found[3], at) end
  end
  call('HSET', name, 'h:' .. run, serial)
end

-- A copy of the assignment lies in the inbox of a run that was forked: it has seen the event.
function topics.saw(message)
  local _, topic, place, run = unpack(message)
  local event = topics.read_event(topic, place)
  if event and not event.consume then call('SADD', key('seen', topic, place), run) end
end

function topics.forget(message)
  local _, topic, place, run = unpack(message)
  local event = topics.read_event(topic, place)
  if event and not event.consume then unsee(event, run) end
end
