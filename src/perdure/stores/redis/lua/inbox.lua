-- Module `inbox`: the messages of runs, and the subscriptions of runs as far as the runs know them.
--
-- Keys: inbox:<run> (hash: number -> framed message; header {kind, id, name} and, for an assignment, {kind, id, topic,
-- partition of the topic, offset, serial, target, sender, sent_at, expires_at, event id}), message-numbers:<run> (hash:
-- message id -> number), serials:<run> (hash: assignment id -> "serial:partition"), subscriptions:<run> (hash: target
-- -> topics grouped by partition), unread:<run> (hash: event name -> number of unread events, of a run with many),
-- consumed (sorted set of consumed event ids by time), run:<id>.

inbox.COUNTED = {event = true, assignment = true} -- count against the mailbox limit; an ended run must finalize them
inbox.WAKES_HELD = {resume = true, cancel = true}

-- The opposite of `read_header`.
local function frame(header, blob)
  local packed = cmsgpack.pack(header)
  return struct.pack('>I4', #packed) .. packed .. blob
end

-- The limit of a mailbox counts unread events by name. While a run has fewer unread events than the limit, the number of
-- all of them (`pending_events`) is enough. The first send to a run with more counts them by name. From then on the
-- counters change with each event, and the field `counted_events` is their sum, until no event is unread. Workers of an
-- earlier version do not change them: if the sum is not `pending_events`, the next send counts again.

-- Return the name of a message of an earlier version, which has it only in the part that Python reads: a map whose
-- field `name` precedes the body, which Lua cannot read.
local function name_in_body(blob)
  local offset, field, value = 1, nil, nil
  while offset > 0 do
    offset, field = cmsgpack.unpack_one(blob, offset)
    offset, value = cmsgpack.unpack_one(blob, offset)
    if field == 'name' then return value end
  end
end

local function event_name(value)
  local header = read_header(value)
  if header[3] then return header[3] end
  local length = struct.unpack('>I4', value)
  local readable, name = pcall(name_in_body, string.sub(value, 5 + length))
  return readable and name or ''
end

local function count_by_name(row)
  local counters, found = key('unread', row.id), {}
  for _, number in ipairs(call('HKEYS', key('inbox', row.id))) do
    local value = call('HGET', key('inbox', row.id), number)
    if inbox.COUNTED[read_header(value)[1]] then
      local name = event_name(value)
      found[name] = (found[name] or 0) + 1
    end
  end
  call('DEL', counters)
  for name, count in pairs(found) do call('HSET', counters, name, count) end
  run_rows.write_unindexed(row, {counted_events = row.pending_events})
end

-- Return the number of unread events with the name of this message if it has reached the limit, otherwise nil.
function inbox.unread_if_full(row, value, limit)
  if tonumber(row.pending_events) < limit then return nil end
  if row.counted_events ~= row.pending_events then count_by_name(row) end
  local unread = tonumber(call('HGET', key('unread', row.id), event_name(value)) or '0')
  return unread >= limit and unread or nil
end

-- Return the fields of the row after one event more or less in the inbox (`change` is 1 or -1).
local function count_event(row, value, change)
  local pending = tonumber(row.pending_events) + change
  if row.counted_events == '' then return {pending_events = pending} end
  if pending == 0 then
    call('DEL', key('unread', row.id))
    return {pending_events = pending, counted_events = ''}
  end
  call('HINCRBY', key('unread', row.id), event_name(value), change)
  return {pending_events = pending, counted_events = tonumber(row.counted_events) + change}
end

-- A run that waits in a queue is never made due. A held run stays suspended. A run that has not started its generation waits for its start time.
local function makes_due(row, kind)
  if row.place == 'waiting' then return false end
  return (row.held_kind == '' and row.first_executed_at ~= '') or row.owner ~= '' or inbox.WAKES_HELD[kind]
end

-- Add a new message and make its run due if the message wakes it; return the number of the message. `paused_state` is the
-- turn state of a waiting run that gets a pause.
function inbox.add(row, message_id, kind, value, now, paused_state)
  local number = tonumber(row.last_message_no) + 1
  call('HSET', key('inbox', row.id), number, value)
  call('HSET', key('message-numbers', row.id), message_id, number)
  local fields = inbox.COUNTED[kind] and count_event(row, value, 1) or {}
  fields.last_message_no = number
  if makes_due(row, kind) then
    local sooner = row.wake_at == '' or tonumber(row.wake_at) > tonumber(now)
    local has_new_messages = row.owner ~= '' and '1' or '0'
    if sooner or row.has_new_messages ~= has_new_messages then -- otherwise an earlier message has woken it
      run_rows.change(row, {wake_at = sooner and now or row.wake_at, has_new_messages = has_new_messages})
    end
  end
  run_rows.write_unindexed(row, fields)
  if row.place == 'waiting' then queues.apply_message(row, kind, paused_state) end
  mark_changed(row.id)
  return number
end

-- Remove a message from the inbox; return whether it was there. `verb` is 'consumed' (the id of an event is remembered)
-- or 'released' (an assignment goes back to its topic, a completion of a deferred loses its id; other kinds stay).
local function remove(row, number, now, verb)
  local name = key('inbox', row.id)
  local value = call('HGET', name, number)
  if not value then return false end
  local kind, message_id, topic, partition, offset, serial = unpack(read_header(value))
  if verb == 'released' and kind ~= 'assignment' and kind ~= 'deferred' then return false end
  call('HDEL', name, number)
  if inbox.COUNTED[kind] then run_rows.write_unindexed(row, count_event(row, value, -1)) end
  if verb == 'released' then
    call('HDEL', key('message-numbers', row.id), message_id)
  elseif kind == 'event' then
    call('ZADD', key('consumed'), now, cmsgpack.pack({row.id, message_id}))
  end
  if kind == 'assignment' then outbox.add(partition, {verb, topic, offset, serial, row.id, now}) end
  return true
end

function inbox.consume(row, numbers, now)
  for _, number in ipairs(numbers) do remove(row, number, now, 'consumed') end
end

function inbox.release_assignments(row, numbers, now)
  for _, number in ipairs(numbers) do remove(row, number, now, 'released') end
end

-- Send unread events of an ended run to their topics: {number, partition, name, publish write, dead letter} each.
function inbox.redirect(row, redirected, now)
  for _, given in ipairs(redirected) do
    local number, partition, name, publish_write, dead_letter = unpack(given)
    if remove(row, number, now, 'consumed') then
      outbox.add(partition, {'send', name, now, publish_write, dead_letter})
    end
  end
end

-- Subscriptions. The topics of a target are stored by partition: {partition, topic ...} ...

function inbox.unsubscribe(row, target)
  local name = key('subscriptions', row.id)
  local found = call('HGET', name, target)
  if not found then return end
  call('HDEL', name, target)
  for _, group in ipairs(cmsgpack.unpack(found)) do
    outbox.add(group[1], {'unsubscribe', group, row.id, PARTITION, target, row.created_at})
  end
end

function inbox.unsubscribe_all(row)
  for _, target in ipairs(call('HKEYS', key('subscriptions', row.id))) do inbox.unsubscribe(row, target) end
end

-- A subscription that is active already keeps its position among the subscriptions of its topics.
function inbox.subscribe(row, subscriptions, now)
  for _, given in ipairs(subscriptions) do
    local target, groups = given[1], given[2]
    if call('HSETNX', key('subscriptions', row.id), target, cmsgpack.pack(groups)) == 1 then
      for _, group in ipairs(groups) do
        outbox.add(group[1], {'subscribe', group, row.id, PARTITION, target, row.created_at, now})
      end
    end
  end
end

-- Handle the assignment of a topic's event to a receive. If the receive is not open any more, the assignment is
-- released. The serial detects a message that is delivered twice.
function inbox.assign(message)
  local _, id, target, topic, partition, offset, serial, body, sender, sent_at, expires_at, now, event_id =
    unpack(message)
  local message_id = 'topic/' .. topic .. '/' .. offset
  local last_serial = string.match(call('HGET', key('serials', id), message_id) or '0', '^%d+')
  if tonumber(last_serial) >= serial then return end
  local row = run_rows.read(id)
  local is_open = row and not TERMINAL[row.status] and call('HEXISTS', key('subscriptions', id), target) == 1
  if not is_open then
    outbox.add(partition, {'released', topic, offset, serial, id, now})
    return
  end
  call('HSET', key('serials', id), message_id, serial .. ':' .. partition)
  inbox.unsubscribe(row, target)
  local header = {
    'assignment', message_id, topic, partition, offset, serial, target, sender, sent_at, expires_at, event_id,
  }
  inbox.add(row, message_id, 'assignment', frame(header, body), now)
end

-- Make messages of a rewound run unread again under their old numbers: {number, id, kind, value, body} each.
function inbox.restore_messages(row, messages, now)
  for _, given in ipairs(messages) do
    local number, message_id, kind, value, body = unpack(given)
    local topic, offset = string.match(message_id, '^topic/(.*)/(%d+)$')
    local serial, partition = string.match(call('HGET', key('serials', row.id), message_id) or '', '^(%d+):(%d+)$')
    if kind == 'assignment' and topic and serial then
      serial, partition, offset = tonumber(serial), tonumber(partition), tonumber(offset)
      local header = read_header(value)
      header[4], header[6] = partition, serial
      value = frame(header, body)
      outbox.add(partition, {'restored', topic, offset, serial, row.id, body})
    end
    call('ZREM', key('consumed'), cmsgpack.pack({row.id, message_id}))
    call('HSET', key('message-numbers', row.id), message_id, number)
    if call('HSET', key('inbox', row.id), number, value) == 1 and inbox.COUNTED[kind] then
      run_rows.write_unindexed(row, count_event(row, value, 1))
    end
  end
end

-- Delete the messages of a pruned run, and notify topics, which remove the run from their lists of readers: a later run
-- with the same id has seen nothing. Nor may the ids that this run consumed expire among those of the later one.
function inbox.delete(id)
  for _, message_id in ipairs(call('HKEYS', key('message-numbers', id))) do
    call('ZREM', key('consumed'), cmsgpack.pack({id, message_id}))
  end
  local found = call('HGETALL', key('serials', id))
  for i = 1, #found, 2 do
    local topic, offset = string.match(found[i], '^topic/(.*)/(%d+)$')
    outbox.add(tonumber(string.match(found[i + 1], ':(%d+)$')), {'run_deleted', topic, tonumber(offset), id})
  end
  call(
    'DEL', key('serials', id), key('inbox', id), key('message-numbers', id), key('subscriptions', id), key('unread', id)
  )
end
