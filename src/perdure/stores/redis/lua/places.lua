-- Module `places`: the places of runs in queues, and the partitions of queues that are ready for an admission.
--
-- A place waits or holds a slot; the run's row says which (field `place`). A waiting place is delayed, or in the order of
-- (priority, number) of its partition, which is one score. Only this module writes these keys, except `slots`.
-- Keys: place:<run> (hash), last-place-number (counter); per queue sorted sets of runs: queue-waiting (by the time of
-- arrival), delayed (number and run, by eligible_at), expiring-places (waiting ones by expires_at), slots (holders by the
-- time from which they are active; by `run_rows.lua`); per queue and partition: waiting-places, delayed-places and
-- held-places (by score); dedupe:<queue, key> (runs by number). Of partitions: queue-partition:<queue, partition> (hash:
-- turn, state, taken, limit, ready_at, keep_until, override), and per queue sorted sets of partitions: queue-partitions
-- (in the order of their bytes), ready-partitions (by turn), timed-partitions (by ready_at), unused-partitions (by the
-- time from which they may be pruned).

local FIELDS = {
  'queue', 'partition', 'priority', 'number', 'since', 'held', 'admitted_at', 'eligible_at', 'expires_at', 'dedupe',
  'latest_at', 'joined_by',
}
local NUMBERS = 17592186044416 -- of places; a score is priority * NUMBERS + number, which a double holds exactly

function places.score(priority, number)
  return string.format('%.0f', priority * NUMBERS + number)
end

function places.hint(queue)
  mark_changed('queue:' .. queue)
end

-- Return the place of a run, or nil. A field that is not set is ''; a number that is damaged is 0, and a time is not set.
function places.read(id)
  local found = call('HMGET', key('place', id), unpack(FIELDS))
  if not found[1] then return nil end
  local place = {id = id}
  for i, field in ipairs(FIELDS) do place[field] = found[i] or '' end
  for _, field in ipairs({'priority', 'number', 'since'}) do place[field] = tonumber(place[field]) and place[field] or '0' end
  for _, field in ipairs({'eligible_at', 'expires_at', 'latest_at'}) do
    if not tonumber(place[field]) then place[field] = '' end
  end
  place.score = places.score(tonumber(place.priority), tonumber(place.number))
  return place
end

local function delayed_member(place)
  return string.format('%016d', place.number) .. place.id
end

local function stale(place)
  stale_partitions[place.queue .. NUL .. place.partition] = place
end

-- Add a place to the indexes of its state.
local function index(place)
  local queue, partition = place.queue, place.partition
  stale(place)
  if place.held == '1' then
    call('ZADD', key('held-places', queue, partition), place.score, place.id)
    return
  end
  call('ZADD', key('queue-waiting', queue), place.since, place.id)
  if place.expires_at ~= '' then call('ZADD', key('expiring-places', queue), place.expires_at, place.id) end
  if place.eligible_at == '' then
    call('ZADD', key('waiting-places', queue, partition), place.score, place.id)
  else
    call('ZADD', key('delayed-places', queue, partition), place.score, place.id)
    call('ZADD', key('delayed', queue), place.eligible_at, delayed_member(place))
  end
end

local function unindex(place)
  local queue, partition = place.queue, place.partition
  stale(place)
  if place.held == '1' then
    call('ZREM', key('held-places', queue, partition), place.id)
    return
  end
  call('ZREM', key('queue-waiting', queue), place.id)
  if place.expires_at ~= '' then call('ZREM', key('expiring-places', queue), place.id) end
  if place.eligible_at == '' then
    call('ZREM', key('waiting-places', queue, partition), place.id)
  else
    call('ZREM', key('delayed-places', queue, partition), place.id)
    call('ZREM', key('delayed', queue), delayed_member(place))
  end
end

local function next_number()
  return call('INCR', key('last-place-number'))
end

-- Add a partition to the queue if it is new: its turn is after the highest that a take has set.
function places.add_partition(queue, partition)
  local name = key('queue-partition', queue, partition)
  if call('EXISTS', name) == 1 then return end
  call('HSET', name, 'turn', (tonumber(call('HGET', key('queue', queue), 'last_turn') or '0') or 0) + 1)
  call('ZADD', key('queue-partitions', queue), 0, partition)
  stale({queue = queue, partition = partition})
end

-- Add the place of a run that begins to wait: {queue, partition, priority, eligible_at, expires_at, dedupe, ..., latest_at}.
function places.add(id, requested, since)
  local queue, partition, priority, eligible_at, expires_at, dedupe, _, _, latest_at = unpack(requested)
  local place = {
    id = id, queue = queue, partition = partition, priority = priority, number = next_number(), since = since,
    held = '', eligible_at = eligible_at, expires_at = expires_at, dedupe = dedupe,
  }
  place.score = places.score(priority, place.number)
  places.add_partition(queue, partition)
  call(
    'HSET', key('place', id), 'queue', queue, 'partition', partition, 'priority', priority, 'number', place.number,
    'since', since, 'eligible_at', eligible_at, 'expires_at', expires_at, 'dedupe', dedupe, 'latest_at', latest_at
  )
  if dedupe ~= '' then call('ZADD', key('dedupe', queue, dedupe), place.number, id) end
  index(place)
  places.hint(queue)
end

-- Change fields of a place: field -> text.
function places.change(place, fields)
  unindex(place)
  for field, value in pairs(fields) do
    place[field] = value
    call('HSET', key('place', place.id), field, value)
  end
  place.score = places.score(tonumber(place.priority), tonumber(place.number))
  index(place)
end

-- Make a delayed place eligible, with a new number.
function places.promote(place)
  local number = next_number()
  if place.dedupe ~= '' then call('ZADD', key('dedupe', place.queue, place.dedupe), number, place.id) end
  places.change(place, {eligible_at = '', number = number})
end

-- Free the slot of a run whose place is missing.
local function remove_damaged(id)
  local queue, partition = unpack(call('HMGET', RUN .. id, 'queue', 'partition'))
  if not queue then return end
  partition = partition or ''
  for _, kind in ipairs({'waiting-places', 'delayed-places', 'held-places'}) do
    call('ZREM', key(kind, queue, partition), id)
  end
  call('ZREM', key('queue-waiting', queue), id)
  call('ZREM', key('expiring-places', queue), id)
  stale({queue = queue, partition = partition})
  places.hint(queue)
end

-- Delete the place of a run; a slot that it holds is free.
function places.remove(id)
  local place = places.read(id)
  if not place then
    remove_damaged(id)
    return
  end
  unindex(place)
  if place.dedupe ~= '' then call('ZREM', key('dedupe', place.queue, place.dedupe), id) end
  if place.held == '1' then places.hint(place.queue) end
  call('DEL', key('place', id))
end

-- Return the places that have a dedupe key: first the one that waits, then the others, latest first.
function places.with_key(queue, dedupe)
  local found = {}
  for _, id in ipairs(call('ZREVRANGE', key('dedupe', queue, dedupe), 0, -1)) do
    local place = places.read(id)
    if place and place.held == '1' then
      found[#found + 1] = place
    elseif place then
      table.insert(found, 1, place)
    end
  end
  return found
end

-- Partitions. A partition is ready by its counts, its limit and its ready_at alone; one with a ready_at is ready from then on,
-- and readers compare it with their time.

local function put(name, member, score)
  if score then call('ZADD', name, score, member) else call('ZREM', name, member) end
end

local function refresh(queue, partition)
  local waiting = call('ZCARD', key('waiting-places', queue, partition))
  local held = call('ZCARD', key('held-places', queue, partition))
  local turn, state, limit, ready_at, keep_until, override = unpack(call(
    'HMGET', key('queue-partition', queue, partition), 'turn', 'state', 'limit', 'ready_at', 'keep_until', 'override'
  ))
  turn, limit, ready_at = tonumber(turn) and turn, tonumber(limit), tonumber(ready_at) and ready_at -- damaged: not set
  local lacks_only_time = turn and waiting > 0 and (not limit or held < limit)
  local is_timed = ready_at
  put(key('ready-partitions', queue), partition, lacks_only_time and not is_timed and turn)
  put(key('timed-partitions', queue), partition, lacks_only_time and is_timed and ready_at)
  local is_used = not turn or waiting + held > 0 or (override or '') ~= ''
    or call('EXISTS', key('delayed-places', queue, partition)) == 1
  local prunable_at = tonumber(keep_until) and keep_until or (state or '') == '' and '-inf'
  put(key('unused-partitions', queue), partition, not is_used and prunable_at)
end

-- Bring the indexes of partitions up to date. It runs once at the end of a script, for all that the script has changed.
function places.refresh_partitions()
  for _, place in pairs(stale_partitions) do refresh(place.queue, place.partition) end
  stale_partitions = {}
end

-- Store fields of a partition: field, text, ...
function places.store_partition(queue, partition, ...)
  places.add_partition(queue, partition)
  call('HSET', key('queue-partition', queue, partition), ...)
  stale({queue = queue, partition = partition})
end

-- Remove the limit and ready_at of every partition: the settings of the queue have changed.
function places.clear_limits(queue)
  for _, partition in ipairs(call('ZRANGE', key('queue-partitions', queue), 0, -1)) do
    call('HDEL', key('queue-partition', queue, partition), 'limit', 'ready_at')
    stale({queue = queue, partition = partition})
  end
end

-- Delete partitions without places and override whose state is not needed any more.
function places.prune_partitions(queue, now, limit)
  places.refresh_partitions()
  local unused = key('unused-partitions', queue)
  for _, partition in ipairs(call('ZRANGEBYSCORE', unused, '-inf', now, 'LIMIT', 0, limit)) do
    call('DEL', key('queue-partition', queue, partition))
    call('ZREM', key('queue-partitions', queue), partition)
    call('ZREM', unused, partition)
  end
end
