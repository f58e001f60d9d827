-- Module `queue_reads`: reads of queues, each one snapshot. It changes nothing; `places.lua` lists the keys.

local SUMMARY_FIELDS = {'version', 'state', 'declared', 'override', 'paused', 'taken', 'full'}

local function first_score(name)
  local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')
  return first[2]
end

-- Return the earliest time at which a place or a partition needs an admission, or ''.
local function next_at(queue)
  local earliest
  for _, kind in ipairs({'delayed', 'expiring-places', 'timed-partitions'}) do
    local at = first_score(key(kind, queue))
    if at and (not earliest or tonumber(at) < tonumber(earliest)) then earliest = at end
  end
  return earliest or ''
end

queue_reads.queues = function()
  local found = {}
  for i, name in ipairs(call('ZRANGE', key('queues'), 0, -1)) do
    found[i] = {
      name, call('HMGET', key('queue', name), unpack(SUMMARY_FIELDS)), call('ZCARD', key('queue-waiting', name)),
      call('ZCARD', key('slots', name)), call('EXISTS', key('ready-partitions', name)), next_at(name),
    }
  end
  return found
end

-- Return the first ready partitions in the order of (turn, name).
local function ready_partitions(queue, now, limit)
  local found = {}
  local function add(partition)
    local fields = call(
      'HMGET', key('queue-partition', queue, partition), 'turn', 'state', 'taken', 'override'
    )
    found[#found + 1] = {
      partition, call('ZCARD', key('waiting-places', queue, partition)),
      call('ZCARD', key('held-places', queue, partition)), unpack(fields),
    }
  end
  for _, partition in ipairs(call('ZRANGE', key('ready-partitions', queue), 0, limit - 1)) do add(partition) end
  for _, partition in ipairs(call('ZRANGEBYSCORE', key('timed-partitions', queue), '-inf', now)) do add(partition) end
  table.sort(found, function(a, b)
    local one, other = tonumber(a[4]) or 0, tonumber(b[4]) or 0
    if one ~= other then return one < other end
    return due_queues.is_less(a[1], b[1])
  end)
  for i = #found, limit + 1, -1 do found[i] = nil end
  return found
end

queue_reads.queue_view = function(name, now, limit)
  local fields = call('HMGET', key('queue', name), unpack(SUMMARY_FIELDS))
  if not fields[1] then return {} end
  local slots, delayed = key('slots', name), key('delayed', name)
  return {
    fields, call('ZCARD', slots), call('ZCOUNT', slots, '-inf', now), ready_partitions(name, now, limit),
    math.min(call('ZCOUNT', delayed, '-inf', now), limit),
    call('ZRANGEBYSCORE', key('expiring-places', name), '-inf', now, 'LIMIT', 0, limit), next_at(name),
  }
end

local function read_place(id)
  return {id, call(
    'HMGET', key('place', id), 'queue', 'partition', 'priority', 'number', 'since', 'held', 'admitted_at', 'eligible_at',
    'expires_at', 'dedupe'
  )}
end

queue_reads.place = function(id) return read_place(id) end

-- Return a page of the places of one partition above a score: {id, fields} each.
local function partition_places(queue, partition, after, limit, kinds)
  local found, places = {}, {}
  for _, kind in ipairs(kinds) do
    local name = key(kind, queue, partition)
    local page = call('ZRANGEBYSCORE', name, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
    for i = 1, #page, 2 do found[#found + 1] = {page[i], tonumber(page[i + 1])} end
  end
  table.sort(found, function(a, b) return a[2] < b[2] end)
  for i = 1, math.min(#found, limit) do places[i] = read_place(found[i][1]) end
  return places
end

-- Return a page of the places of a queue, from a partition and a score on; `only`: of this partition alone.
queue_reads.places = function(queue, only, partition, after, limit, held)
  local kinds = held and {'held-places'} or {'waiting-places', 'delayed-places'}
  if only then return partition_places(queue, partition, after, limit, kinds) end
  local found, names, first = {}, key('queue-partitions', queue), '[' .. partition
  while #found < limit do
    local page = call('ZRANGEBYLEX', names, first, '+', 'LIMIT', 0, 100)
    for _, each in ipairs(page) do
      local above = each == partition and after or '-inf'
      for _, place in ipairs(partition_places(queue, each, above, limit - #found, kinds)) do found[#found + 1] = place end
      if #found >= limit then return found end
      first = '(' .. each
    end
    if #page < 100 then break end
  end
  return found
end

queue_reads.places_ahead = function(id, score)
  local queue, partition, held = unpack(call('HMGET', key('place', id), 'queue', 'partition', 'held'))
  if not queue or held == '1' then return 0 end
  return call('ZCOUNT', key('waiting-places', queue, partition), '-inf', '(' .. score)
end
