-- Questions that need more than one key as of one moment: ARGV[1] is the question and its arguments (MessagePack).

local reads = {}

reads.load = function(ids)
  local found = {}
  for i, id in ipairs(ids) do
    local run = call('HGETALL', RUN .. id)
    found[i] = #run > 0 and {run, call('HGETALL', ENTRIES .. id), call('HGETALL', key('mail', id))} or false
  end
  return found
end

-- At least all rows after this position: each by itself, or where that would be more work, all there are.
reads.history = function(id, after)
  local row, found = rows.glance(id), {}
  if not row then return found end
  local last = rows.position(row)
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

-- Ids of an index newest first with their moments: from `before` on, or after this id of that moment.
local function newest(index, before, id, limit)
  local name, found, offset = TAG .. ':' .. index, {}, 0
  while #found < 2 * limit do
    local page = call('ZREVRANGEBYSCORE', name, before, '-inf', 'WITHSCORES', 'LIMIT', offset, limit)
    for i = 1, #page, 2 do
      if id == '' or tonumber(page[i + 1]) < tonumber(before) or queues.less(page[i], id) then
        found[#found + 1] = page[i]
        found[#found + 1] = page[i + 1]
      end
    end
    if #page < 2 * limit then return found end
    offset = offset + limit
  end
  return found
end

-- A page of each of these indexes, as of one moment: a run that passes from one to another is in one of them.
reads.pages = function(indexes, before, id, limit)
  local found = {}
  for i, index in ipairs(indexes) do found[i] = newest(index, before, id, limit) end
  return found
end

reads.due = function(now, wanted, pool, shards, limit)
  local found = {}
  for i, due in ipairs(queues.due(now, wanted, pool, shards, limit)) do
    found[i] = {due[1], string.format('%.17g', due[2])}
  end
  return found
end

reads.outbox = function()
  return call('HGETALL', key('outbox'))
end

reads.next_wake = function(pool)
  return call('ZRANGE', key('heads', pool), 0, 0, 'WITHSCORES')[2] or ''
end

reads.prunable = function(now, offset, limit)
  local found = {}
  for i, id in ipairs(call('ZRANGEBYSCORE', key('prunable'), '-inf', now, 'LIMIT', offset, limit)) do
    found[i] = {id, call('HGET', RUN .. id, 'parent') or ''}
  end
  return found
end

-- Runs that still owe something, with a page each of those to be told and of mail to be dealt with.
reads.unsettled = function(limit, page)
  local found = {}
  for i, id in ipairs(call('ZRANGE', key('unsettled'), 0, limit - 1)) do
    local run, observers = call('HGETALL', RUN .. id), call('ZRANGE', key('observers', id), 0, page - 1)
    found[i] = {run, observers, call('HGETALL', key('mail', id))}
  end
  return found
end

local function events_at(topic, places)
  local found = {}
  for _, place in ipairs(places) do
    local name = key('event', topic, place)
    local fields = call('HMGET', name, 'id', 'body', 'sent', 'delivery', 'consume', 'expires', 'sender', 'own')
    found[#found + 1] = {topic, place, unpack(fields)}
  end
  return found
end

-- What became of something that another slice has sent here; empty if it has not come.
reads.sent = function(name)
  local found = call('HGET', key('sent'), name)
  return found and cmsgpack.unpack(found) or {}
end

reads.topic = function(topic, after, limit)
  return events_at(topic, call('ZRANGEBYSCORE', key('events', topic), '(' .. after, '+inf', 'LIMIT', 0, limit))
end

reads.unfinished = function(limit)
  local found = {}
  for _, topic in ipairs(call('ZRANGE', key('unfinished-topics'), 0, -1)) do
    local places = call('ZRANGE', key('unfinished', topic), 0, limit - #found - 1)
    for _, event in ipairs(events_at(topic, places)) do found[#found + 1] = event end
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

reads.letters = function(after, limit)
  local order, found = key('letter-order'), {}
  local ids = call('ZRANGEBYSCORE', order, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
  for i = 1, #ids, 2 do found[#found + 1] = {ids[i + 1], call('HGET', key('letters'), ids[i])} end
  return found
end

local asked = cmsgpack.unpack(ARGV[1])
return reads[asked[1]](unpack(asked, 2))
