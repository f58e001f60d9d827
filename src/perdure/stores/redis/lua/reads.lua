-- Script `reads`: queries that need a consistent view of more than one key. It changes nothing.
--
-- ARGV[1]: the query and its arguments (MessagePack).

local reads = {}

reads.load = function(ids)
  local found = {}
  for i, id in ipairs(ids) do
    local run = call('HGETALL', RUN .. id)
    found[i] = #run > 0 and {run, call('HGETALL', ENTRIES .. id), call('HGETALL', key('inbox', id))} or false
  end
  return found
end

-- Return at least all entries after this position: one by one, or the whole history if that is less work.
reads.history = function(id, after)
  local row, found = run_rows.read_core(id), {}
  if not row then return found end
  local last = run_rows.position(row)
  if last - after >= call('HLEN', ENTRIES .. id) then return call('HGETALL', ENTRIES .. id) end
  for position = after + 1, last do
    local value = call('HGET', ENTRIES .. id, position)
    if value then
      found[#found + 1] = tostring(position)
      found[#found + 1] = value
    end
  end
  return found
end

-- Return the first entries at these positions, without markers, and whether there are `limit` of them.
local function entries_at(id, positions, limit)
  local found = {}
  for _, position in ipairs(positions) do
    local value = call('HGET', ENTRIES .. id, position)
    if value and not read_header(value)[3] then
      found[#found + 1] = tostring(position)
      found[#found + 1] = value
      if #found == 2 * limit then return found, true end
    end
  end
  return found, false
end

-- Return the first entries after this position: by counting up or, if most of these positions have no entry, by reading
-- all positions of the history.
reads.history_page = function(id, after, limit)
  local row, positions = run_rows.read_core(id), {}
  if not row then return {} end
  local last = run_rows.position(row)
  for position = after + 1, math.min(last, after + 4 * limit) do positions[#positions + 1] = position end
  local found, is_full = entries_at(id, positions, limit)
  if is_full or after + 4 * limit >= last then return found end
  positions = {}
  for _, position in ipairs(call('HKEYS', ENTRIES .. id)) do
    if tonumber(position) > after then positions[#positions + 1] = tonumber(position) end
  end
  table.sort(positions)
  return (entries_at(id, positions, limit))
end

-- Return these fields of the rows of runs, and `turn_state` unless the run succeeded: then it contains only the result.
reads.bare = function(ids, fields)
  local found = {}
  for i, id in ipairs(ids) do
    local values = call('HMGET', RUN .. id, 'status', unpack(fields))
    local ended_well = values[1] == 'succeeded'
    values[#fields + 2] = not ended_well and call('HGET', RUN .. id, 'turn_state') or false
    found[i] = values
  end
  return found
end

-- Return how many runs each index has between two scores: {index, lowest, highest} each.
reads.counts = function(ranges)
  local found = {}
  for i, range in ipairs(ranges) do found[i] = call('ZCOUNT', TAG .. ':' .. range[1], range[2], range[3]) end
  return found
end

-- Return a page of the runs of an index between two scores, each with its creation time.
reads.range = function(index, lowest, highest, offset, limit)
  local found = {}
  local ids = call('ZRANGEBYSCORE', TAG .. ':' .. index, lowest, highest, 'LIMIT', offset, limit)
  for i, id in ipairs(ids) do found[i] = {id, call('HGET', RUN .. id, 'created_at')} end
  return found
end

-- Return ids and scores of an index, newest first, from `before` on; with an id: those that follow it in that order.
local function newest(index, before, id, limit)
  local name, found, offset = TAG .. ':' .. index, {}, 0
  while #found < 2 * limit do
    local page = call('ZREVRANGEBYSCORE', name, before, '-inf', 'WITHSCORES', 'LIMIT', offset, limit)
    for i = 1, #page, 2 do
      if id == '' or tonumber(page[i + 1]) < tonumber(before) or due_queues.is_less(page[i], id) then
        found[#found + 1] = page[i]
        found[#found + 1] = page[i + 1]
      end
    end
    if #page < 2 * limit then return found end
    offset = offset + limit
  end
  return found
end

-- Return a page of each index. One call reads all of them, so that a run that changes its status is not missed.
reads.pages = function(indexes, before, id, limit)
  local found = {}
  for i, index in ipairs(indexes) do found[i] = newest(index, before, id, limit) end
  return found
end

reads.due = function(now, wanted, pool, shards, limit, gates)
  local found = {}
  for i, due in ipairs(due_queues.earliest(now, wanted, pool, shards, limit, gates)) do
    found[i] = {due[1], string.format('%.17g', due[2])}
  end
  return found
end

reads.outbox = function()
  return call('HGETALL', key('outbox'))
end

-- Return when the first due run of a pool is due, or ''. A head whose queue is missing counts for nothing; with `gates` nor
-- does one with another gate.
reads.next_wake = function(pool, gates)
  local counted = {[''] = true}
  for _, gate in ipairs(gates or {}) do counted[gate] = true end
  local function first_due(queue)
    if gates and not counted[due_queues.gate_of(queue)] then return nil end
    return call('ZRANGE', key('due', pool, queue), 0, 0, 'WITHSCORES')[2]
  end
  for _, queue in ipairs(call('ZRANGE', key('heads', pool), 0, 0)) do
    local at = first_due(queue)
    if at then return at end
  end
  local earliest
  for _, queue in ipairs(call('ZRANGE', key('heads', pool), 1, -1)) do
    local at = first_due(queue)
    if at and (not earliest or tonumber(at) < tonumber(earliest)) then earliest = at end
  end
  return earliest or ''
end

reads.prunable = function(now, offset, limit)
  local found = {}
  for i, id in ipairs(call('ZRANGEBYSCORE', key('prunable'), '-inf', now, 'LIMIT', offset, limit)) do
    found[i] = {id, call('HGET', RUN .. id, 'parent') or ''}
  end
  return found
end

-- Return runs that need finalization, each with a page of its observers and its messages.
reads.unfinalized = function(limit, page)
  local found = {}
  for i, id in ipairs(call('ZRANGE', key('unfinalized'), 0, limit - 1)) do
    local run, observers = call('HGETALL', RUN .. id), call('ZRANGE', key('observers', id), 0, page - 1)
    found[i] = {id, run, observers, call('HGETALL', key('inbox', id))}
  end
  return found
end

local function read_events(topic, offsets)
  local found = {}
  for _, offset in ipairs(offsets) do
    local fields = call(
      'HMGET', key('event', topic, offset),
      'id', 'body', 'sent_at', 'delivery', 'consume', 'expires_at', 'sender', 'event_id'
    )
    found[#found + 1] = {topic, offset, unpack(fields)}
  end
  return found
end

-- Return the result of what another partition has sent here; empty if it has not arrived.
reads.sent = function(name)
  local found = call('HGET', key('sent'), name)
  return found and cmsgpack.unpack(found) or {}
end

-- Return the number of runs with a subscription to a topic. Of more than 10,000 subscriptions each counts as a run.
local function count_waiting(topic)
  local subscriptions = call('ZCARD', key('waiting', topic))
  if subscriptions > 10000 then return subscriptions end
  local runs, count = {}, 0
  for _, member in ipairs(call('ZRANGE', key('waiting', topic), 0, -1)) do
    local readable, subscription = pcall(cmsgpack.unpack, member)
    local run = readable and type(subscription) == 'table' and subscription[1] or member
    if not runs[run] then
      runs[run] = true
      count = count + 1
    end
  end
  return count
end

-- Return the first topics after a name with their queued events and waiting runs.
reads.topics = function(after, limit)
  local found = {}
  for i, name in ipairs(call('ZRANGEBYLEX', key('topic-names'), after, '+', 'LIMIT', 0, limit)) do
    local queued = call('ZCARD', key('free', name)) + call('ZCARD', key('shared', name))
    found[i] = {name, queued, count_waiting(name)}
  end
  return found
end

local function read_documents(kind, ids)
  local found = {}
  for _, id in ipairs(ids) do
    local fields = call('HMGET', key('document', kind, id), 'version', 'body', 'due_at', 'expires_at')
    if fields[1] then found[#found + 1] = {id, unpack(fields)} end
  end
  return found
end

reads.document = function(kind, id) return read_documents(kind, {id}) end

reads.documents = function(kind, after, limit)
  return read_documents(kind, call('ZRANGEBYLEX', key('documents', kind), after, '+', 'LIMIT', 0, limit))
end

reads.due_documents = function(kind, due_by, limit)
  local name = key('due-documents', kind)
  return read_documents(kind, call('ZRANGEBYSCORE', name, '-inf', due_by, 'LIMIT', 0, limit))
end

reads.topic = function(topic, after, limit)
  return read_events(topic, call('ZRANGEBYSCORE', key('events', topic), '(' .. after, '+inf', 'LIMIT', 0, limit))
end

reads.unfinished_broadcasts = function(limit)
  local found = {}
  for _, topic in ipairs(call('ZRANGE', key('unfinished-topics'), 0, -1)) do
    local offsets = call('ZRANGE', key('unfinished', topic), 0, limit - #found - 1)
    for _, event in ipairs(read_events(topic, offsets)) do found[#found + 1] = event end
    if #found >= limit then return found end
  end
  return found
end

reads.stream = function(id, stream, start, limit)
  local items, found = call('LRANGE', key('stream', id, stream), start, start + limit - 1), {}
  for i, blob in ipairs(items) do
    found[i] = {blob, call('SISMEMBER', key('superseded', id, stream), start + i - 1)}
  end
  return found
end

reads.dead_letters = function(after, limit)
  local order, found = key('dead-letter-order'), {}
  local ids = call('ZRANGEBYSCORE', order, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #ids, 2 do found[#found + 1] = {ids[i + 1], call('HGET', key('dead-letters'), ids[i])} end
  return found
end

local query = cmsgpack.unpack(ARGV[1])
return (reads[query[1]] or queue_reads[query[1]])(unpack(query, 2))
