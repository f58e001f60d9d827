-- Module `topics`: events at their offsets, subscriptions, and assignments of events to runs.
--
-- Keys: topic:<name> (hash of counters: last_offset, last_subscription, last_serial), event:<topic, offset> (hash),
-- event-ids:<topic> (hash: event id -> offset), events:<topic> (sorted set of offsets), free:<topic> and shared:<topic>
-- (sorted sets of queued offsets), queued-until:<topic> (sorted set: when queued events expire), seen:<topic, offset>
-- (set of runs), cursors:<topic> (hash: run -> read cursor), waiting:<topic> (sorted set: subscriptions in their
-- order), unfinished:<topic> and unfinished-topics (sorted sets), topic-names (sorted set of the topics with queued events
-- or subscriptions, in the order of their bytes), expiring-events and deleted-events (sorted sets by
-- time).
--
-- An event is queued as `free` (one run may take it) or `shared` (every run may see it once). An assigned event, and an
-- event only for subscriptions that were active when it was published, is in neither. `fan_out_cursor` is set while the
-- fan-out is unfinished: the number of the last subscription that was offered the event. `h:<run>` is the serial of an
-- assignment that is neither consumed nor released. A deleted event (`deleted_at`) stays without its body, so that a
-- repeated publish is detected, until its id may be deleted too.
--
-- Why an event and a subscription cannot miss each other: publish and subscribe are calls in the partition of the
-- topic, so that one is first. It leaves what the other looks for: a queued event or an active subscription. A run that
-- cancels a receive, or releases an event, does so by partition messages, which stay in the outbox until they are
-- handled. If an assignment is under way at the same time, it meets no open receive and is released (`inbox.assign`).

local STORED_FIELDS = 9 -- that `store_event` writes
local EVENT_FIELDS = {
  'id', 'delivery', 'consume', 'sent_at', 'expires_at', 'sender', 'last_subscription', 'body', 'fan_out_cursor',
  'deleted_at', 'event_id',
}

local function is_expired(expires_at, now)
  return expires_at ~= '' and tonumber(expires_at) <= tonumber(now)
end

-- Bring `topic-names` up to date. It runs once at the end of a script, for all topics that the script has changed.
function topics.refresh_names()
  for topic in pairs(stale_topics) do topics.index_name(topic) end
end

function topics.index_name(topic)
  if call('EXISTS', key('waiting', topic), key('free', topic), key('shared', topic)) > 0 then
    call('ZADD', key('topic-names'), 0, topic)
  else
    call('ZREM', key('topic-names'), topic)
  end
end

function topics.event_key(topic, offset) return key('event', topic, offset) end

-- Return an event, or nil if it does not exist or was deleted.
function topics.read_event(topic, offset)
  local found = call('HMGET', topics.event_key(topic, offset), unpack(EVENT_FIELDS))
  if not found[1] or found[10] then return nil end
  return {
    topic = topic, offset = tonumber(offset), id = found[1], delivery = found[2],
    is_queueable = found[2] ~= 'after_wait', consume = found[3] == '1', sent_at = found[4], expires_at = found[5],
    sender = found[6], last_subscription = tonumber(found[7]), body = found[8],
    fan_out_cursor = found[9] and tonumber(found[9]), event_id = found[11],
  }
end

-- Queue the event for later subscriptions.
local function enqueue(event)
  call('ZADD', key(event.consume and 'free' or 'shared', event.topic), event.offset, event.offset)
  if event.expires_at ~= '' then call('ZADD', key('queued-until', event.topic), event.expires_at, event.offset) end
  stale_topics[event.topic] = true
end

local function dequeue(event)
  call('ZREM', key(event.consume and 'free' or 'shared', event.topic), event.offset)
  call('ZREM', key('queued-until', event.topic), event.offset)
  stale_topics[event.topic] = true
end

-- Set the fan-out cursor; nil: the fan-out is finished.
local function set_fan_out_cursor(event, cursor)
  local unfinished = key('unfinished', event.topic)
  event.fan_out_cursor = cursor
  if cursor then
    call('HSET', topics.event_key(event.topic, event.offset), 'fan_out_cursor', cursor)
    call('ZADD', unfinished, event.offset, event.offset)
    call('ZADD', key('unfinished-topics'), 0, event.topic)
  else
    call('HDEL', topics.event_key(event.topic, event.offset), 'fan_out_cursor')
    call('ZREM', unfinished, event.offset)
    if call('EXISTS', unfinished) == 0 then call('ZREM', key('unfinished-topics'), event.topic) end
  end
end

function topics.delete_event(event, now)
  dequeue(event)
  set_fan_out_cursor(event, nil)
  call('HDEL', topics.event_key(event.topic, event.offset), 'body')
  call('HSET', topics.event_key(event.topic, event.offset), 'deleted_at', now)
  call('DEL', key('seen', event.topic, event.offset))
  call('ZREM', key('events', event.topic), event.offset)
  call('ZREM', key('expiring-events'), cmsgpack.pack({event.topic, event.offset}))
  call('ZADD', key('deleted-events'), now, cmsgpack.pack({event.topic, event.offset}))
  if call('EXISTS', key('shared', event.topic)) == 0 then call('DEL', key('cursors', event.topic)) end
end

-- Return whether an assignment of the event is open. Each has a field `h:<run>`, beside those of `store_event`;
-- counting the fields avoids reading all holders. Not for events that are unfinished or deleted, which have other
-- fields.
local function has_open_assignment(event)
  return call('HLEN', topics.event_key(event.topic, event.offset)) > STORED_FIELDS
end

-- Delete an event that later subscriptions may not have, when no run holds it any more.
local function delete_if_unreferenced(event, now)
  if not event.is_queueable and not event.fan_out_cursor and not has_open_assignment(event) then
    topics.delete_event(event, now)
  end
end

local function is_eligible(event, run, created_at)
  if event.delivery == 'after_create' and tonumber(created_at) > tonumber(event.sent_at) then return false end
  return event.consume or call('SISMEMBER', key('seen', event.topic, event.offset), run) == 0
end

-- Assign the event to a subscription: {run, partition, target, created_at of the run}.
local function assign(event, subscription, now)
  local topic, offset = event.topic, event.offset
  local serial = call('HINCRBY', key('topic', topic), 'last_serial', 1)
  call('ZREM', key('waiting', topic), cmsgpack.pack(subscription))
  stale_topics[topic] = true
  call('HSET', topics.event_key(topic, offset), 'h:' .. subscription[1], serial)
  if event.consume then
    dequeue(event)
    set_fan_out_cursor(event, nil)
  else
    call('SADD', key('seen', topic, offset), subscription[1])
  end
  outbox.add(subscription[2], {
    'assign', subscription[1], subscription[3], topic, PARTITION, offset, serial,
    event.body, event.sender, event.sent_at, event.expires_at, now, event.event_id,
  })
end

-- Visit the subscriptions numbered above `after`, up to `last`, oldest first, until `visit` returns true.
local function each_subscription(topic, after, last, visit)
  local size = 100
  while true do
    local page = call('ZRANGEBYSCORE', key('waiting', topic), '(' .. after, last, 'WITHSCORES', 'LIMIT', 0, size)
    for i = 1, #page, 2 do
      after = page[i + 1]
      if visit(cmsgpack.unpack(page[i]), tonumber(after)) then return end
    end
    if #page < 2 * size then return end
  end
end

-- Return the oldest subscription that is eligible for the event, or nil; `run`: only subscriptions of this run.
local function oldest_subscription(event, run)
  local found
  each_subscription(event.topic, 0, event.is_queueable and '+inf' or event.last_subscription, function(subscription)
    if (not run or subscription[1] == run) and is_eligible(event, subscription[1], subscription[4]) then
      found = subscription
    end
    return found ~= nil
  end)
  return found
end

-- Finish the fan-out; return how many more runs got the event.
local function finish_fan_out(event, now)
  set_fan_out_cursor(event, nil)
  local subscription = event.consume and event.is_queueable and oldest_subscription(event) -- one created meanwhile
  if subscription then
    assign(event, subscription, now)
    return 1
  end
  delete_if_unreferenced(event, now)
  return 0
end

-- Offer the event to the next page of subscriptions that were active when it was published; return how many got it.
local function offer_page(event, now, page)
  if is_expired(event.expires_at, now) then
    topics.delete_event(event, now)
    return 0
  end
  local woken, visited, last = 0, 0, event.fan_out_cursor
  each_subscription(event.topic, event.fan_out_cursor, event.last_subscription, function(subscription, number)
    if visited == page then return true end
    visited, last = visited + 1, number
    if is_eligible(event, subscription[1], subscription[4]) then
      assign(event, subscription, now)
      woken = woken + 1
      return event.consume
    end
  end)
  if event.consume and woken == 1 then return 1 end
  if call('ZCOUNT', key('waiting', event.topic), '(' .. last, event.last_subscription) > 0 then
    set_fan_out_cursor(event, last)
    return woken
  end
  return woken + finish_fan_out(event, now)
end

-- Return how many events are queued if the topic is full, or nil. Expired events do not count.
local function count_if_full(topic, limit, now)
  if limit < 0 then return nil end
  local queued = call('ZCARD', key('free', topic)) + call('ZCARD', key('shared', topic))
  if queued >= limit then queued = queued - call('ZCOUNT', key('queued-until', topic), '-inf', now) end
  return queued >= limit and queued or nil
end

-- Store a new event with STORED_FIELDS fields.
local function store_event(event)
  local topic, offset = event.topic, event.offset
  call('HSET', topics.event_key(topic, offset), 'id', event.id, 'delivery', event.delivery, 'sent_at', event.sent_at,
    'consume', event.consume and '1' or '0', 'expires_at', event.expires_at, 'sender', event.sender,
    'last_subscription', event.last_subscription, 'body', event.body, 'event_id', event.event_id)
  call('HSET', key('event-ids', topic), event.id, offset)
  call('ZADD', key('events', topic), offset, offset)
  if event.expires_at ~= '' then
    call('ZADD', key('expiring-events'), event.expires_at, cmsgpack.pack({topic, offset}))
  end
  if event.is_queueable then enqueue(event) end
end

-- Returns {'published', offset, runs that got it, whether the fan-out is unfinished, whether the event is new}.
function topics.publish(write)
  local _, topic, id, delivery, consume, sent_at, expires_at, sender, body, now, limit, page, event_id = unpack(write)
  local known = call('HGET', key('event-ids', topic), id)
  if known then
    local unfinished = call('HEXISTS', topics.event_key(topic, known), 'fan_out_cursor')
    return {'published', tonumber(known), 0, unfinished, 0}
  end
  local event = {
    topic = topic, id = id, delivery = delivery, is_queueable = delivery ~= 'after_wait', consume = consume,
    sent_at = sent_at, expires_at = expires_at, sender = sender, body = body, event_id = event_id,
    last_subscription = tonumber(call('HGET', key('topic', topic), 'last_subscription') or '0'),
  }
  local has_unfinished = call('EXISTS', key('unfinished', topic)) == 1
  if event.is_queueable and not is_expired(expires_at, now) then
    local queued = count_if_full(topic, limit, now)
    if queued and (has_unfinished or not consume or not oldest_subscription(event)) then return {'full', queued} end
  end
  event.offset = call('HINCRBY', key('topic', topic), 'last_offset', 1)
  store_event(event)
  set_fan_out_cursor(event, 0)
  -- Earlier events of the topic are offered first.
  if has_unfinished and not is_expired(expires_at, now) then return {'published', event.offset, 0, 1, 1} end
  local woken = offer_page(event, now, page)
  return {'published', event.offset, woken, event.fan_out_cursor and 1 or 0, 1}
end

-- Offer the next page of the earliest unfinished event of the topic, which may be another event than the given one.
function topics.fan_out(write)
  local _, topic, offset, now, page = unpack(write)
  local wanted = topics.read_event(topic, offset)
  if not wanted or not wanted.fan_out_cursor then return {'published', offset, 0, 0, 1} end
  local first = topics.read_event(topic, call('ZRANGE', key('unfinished', topic), 0, 0)[1])
  local woken = offer_page(first, now, page)
  if first.offset ~= wanted.offset then return {'published', offset, 0, 1, 1} end
  return {'published', offset, woken, first.fan_out_cursor and 1 or 0, 1}
end

-- Return the first queued event of a kind that this run may have, and the last offset before it that was looked at.
local function first_queued(topic, kind, after, run, created_at, now)
  local size, last = 50, after
  while true do
    local page = call('ZRANGEBYSCORE', key(kind, topic), '(' .. last, '+inf', 'LIMIT', 0, size)
    for _, offset in ipairs(page) do
      local event = topics.read_event(topic, offset)
      local is_offered = event.consume and event.fan_out_cursor -- to older subscriptions, which come first
      if not is_offered and not is_expired(event.expires_at, now) and is_eligible(event, run, created_at) then
        return event, last
      end
      last = offset
    end
    if #page < size then return nil, last end
  end
end

local function first_of_topic(topic, run, created_at, now)
  local free = first_queued(topic, 'free', 0, run, created_at, now)
  -- The read cursor skips events that the run has seen, so that it does not look at them again every time.
  local cursors = key('cursors', topic)
  local cursor = call('HGET', cursors, run) or '0'
  local shared, last = first_queued(topic, 'shared', cursor, run, created_at, now)
  if last ~= cursor then call('HSET', cursors, run, last) end
  if shared and free then return shared.offset < free.offset and shared or free end
  return shared or free
end

-- Handlers of partition messages. Each detects a message that it has handled before.

-- Take the event that was sent first in any of the topics. If there is none, subscribe to all of them.
function topics.subscribe(message)
  local _, group, run, partition, target, created_at, now = unpack(message)
  local subscription, found = {run, partition, target, created_at}, nil
  local member = cmsgpack.pack(subscription)
  for i = 2, #group do
    if call('ZSCORE', key('waiting', group[i]), member) then return end
    local event = first_of_topic(group[i], run, created_at, now)
    if event and (not found or tonumber(event.sent_at) < tonumber(found.sent_at)) then found = event end
  end
  if found then
    assign(found, subscription, now)
    return
  end
  for i = 2, #group do
    local number = call('HINCRBY', key('topic', group[i]), 'last_subscription', 1)
    call('ZADD', key('waiting', group[i]), number, member)
    stale_topics[group[i]] = true
  end
end

function topics.unsubscribe(message)
  local _, group, run, partition, target, created_at = unpack(message)
  local member = cmsgpack.pack({run, partition, target, created_at})
  for i = 2, #group do
    call('ZREM', key('waiting', group[i]), member)
    stale_topics[group[i]] = true
  end
end

-- Close an assignment; return its event, or nil if the assignment was closed before.
local function close_assignment(message)
  local _, topic, offset, serial, run = unpack(message)
  local name, holder = topics.event_key(topic, offset), 'h:' .. run
  if tonumber(call('HGET', name, holder) or '-1') ~= serial then return nil end
  call('HDEL', name, holder)
  return topics.read_event(topic, offset)
end

function topics.consumed(message)
  local event, now = close_assignment(message), message[6]
  if not event then return end
  if event.consume then topics.delete_event(event, now) else delete_if_unreferenced(event, now) end
end

local function clear_seen(event, run)
  call('SREM', key('seen', event.topic, event.offset), run)
  local cursor = call('HGET', key('cursors', event.topic), run)
  if cursor and tonumber(cursor) >= event.offset then
    call('HSET', key('cursors', event.topic), run, event.offset - 1)
  end
end

-- A run releases the assignment: the event goes to the oldest subscription, or back to the queue at its old offset.
function topics.released(message)
  local event, run, now = close_assignment(message), message[5], message[6]
  if not event then return end
  if not event.consume then clear_seen(event, run) end
  if is_expired(event.expires_at, now) then
    topics.delete_event(event, now)
    return
  end
  local subscription = oldest_subscription(event, not event.consume and run)
  if subscription then
    assign(event, subscription, now)
  elseif event.consume and event.is_queueable then
    enqueue(event)
  else
    delete_if_unreferenced(event, now)
  end
end

-- A rewound run has this assignment unread again: an event that was deleted because the run consumed it is restored.
function topics.restored(message)
  local _, topic, offset, serial, run, body = unpack(message)
  local name = topics.event_key(topic, offset)
  local found = call('HMGET', name, 'deleted_at', 'consume', 'expires_at')
  if not found[2] then return end
  if found[1] then
    if found[2] == '0' then return end
    local at = cmsgpack.pack({topic, offset})
    call('HDEL', name, 'deleted_at')
    call('HSET', name, 'body', body)
    call('ZREM', key('deleted-events'), at)
    call('ZADD', key('events', topic), offset, offset)
    if found[3] ~= '' then call('ZADD', key('expiring-events'), found[3], at) end
  end
  call('HSET', name, 'h:' .. run, serial)
end

-- A forked run has a copy of the assignment in its inbox: it has seen the event.
function topics.mark_seen(message)
  local _, topic, offset, run = unpack(message)
  local event = topics.read_event(topic, offset)
  if event and not event.consume then call('SADD', key('seen', topic, offset), run) end
end

-- A pruned run has seen nothing any more.
function topics.run_deleted(message)
  local _, topic, offset, run = unpack(message)
  local event = topics.read_event(topic, offset)
  if event and not event.consume then clear_seen(event, run) end
end
