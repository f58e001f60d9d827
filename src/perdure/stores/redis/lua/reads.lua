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

reads.due = function(now, wanted, pool, shards, limit)
  local found = {}
  for i, due in ipairs(due_queues.earliest(now, wanted, pool, shards, limit)) do
    found[i] = {due[1], string.format('%.17g', due[2])}
  end
  return found
end

reads.outbox = function()
  return call('HGETALL', key('outbox'))
end

-- Return when the first due run of a pool is due. A head whose queue is missing counts for nothing.
reads.next_wake = function(pool)
  for _, queue in ipairs(call('ZRANGE', key('heads', pool), 0, 0)) do
    local first = call('ZRANGE', key('due', pool, queue), 0, 0, 'WITHSCORES')
    if first[2] then return first[2] end
  end
  local earliest
  for _, queue in ipairs(call('ZRANGE', key('heads', pool), 1, -1)) do
    local first = call('ZRANGE', key('due', pool, queue), 0, 0, 'WITHSCORES')
    if first[2] and (not earliest or tonumber(first[2]) < tonumber(earliest)) then earliest = first[2] end
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
return reads[query[1]](unpack(query, 2))
