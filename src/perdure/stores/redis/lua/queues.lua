-- Module `queues`: settings of queues, arrivals, admissions and departures. It plans nothing: an admission says how many
-- runs it takes from which partition, and is applied only to the version of the queue that it was planned from.
--
-- Keys: queues (sorted set of names), queue:<name> (hash: version, declared, override, paused, state, taken, full,
-- last_turn), run:<id>; places and partitions by `places.lua`. All keys of a queue are in this partition, as are its runs.

-- Arrivals

-- Return how a start joins a place that has its dedupe key, or nil: {place, its eligible_at, whether it changes the place}.
-- A repeated call finds its own id and changes nothing.
local function find_duplicate(requested, created_by)
  local queue, _, _, eligible_at, _, dedupe, on_duplicate, debounce = unpack(requested)
  local found, replaces = places.with_key(queue, dedupe), on_duplicate == 'replace'
  for _, place in ipairs(found) do
    if place.joined_by == created_by then return place, place.eligible_at, false end
  end
  local first = found[1]
  if not first or (first.held == '1' and (replaces or debounce)) then return nil end
  if not debounce or first.eligible_at == '' then return first, first.eligible_at, replaces or debounce end
  local latest = tonumber(first.latest_at)
  if latest and latest < tonumber(eligible_at) then eligible_at = first.latest_at end
  return first, eligible_at, true
end

-- Give a waiting run the payload of another start: the fields of its row, flat.
local function replace_payload(id, fields, now)
  local row, given = run_rows.read(id), {pool = 'default'}
  for i = 1, #fields, 2 do given[fields[i]] = fields[i + 1] end
  if not row then return end
  run_rows.change(row, {workflow = given.workflow, version = given.version, pool = given.pool, updated_at = now})
  call('HSET', RUN .. id, 'input', given.input)
end

-- Return why a new run gets no place, or nil. A start that joins another run changes that one.
function queues.refuse(requested, created_by, fields, now)
  local queue, dedupe, replaces = requested[1], requested[6], requested[7] == 'replace'
  local version, full = unpack(call('HMGET', key('queue', queue), 'version', 'full'))
  if not version then return {'queue_missing'} end
  if dedupe ~= '' then
    local place, eligible_at, changes = find_duplicate(requested, created_by)
    if changes then
      call('HSET', key('place', place.id), 'joined_by', created_by)
      if eligible_at ~= place.eligible_at then
        places.change(place, {eligible_at = eligible_at})
        places.hint(queue)
      end
      if replaces then replace_payload(place.id, fields, now) end
    end
    if place then return {'joined', place.id, replaces and 1 or 0, place.held == '1' and 0 or 1} end
  end
  if full == '1' then return {'full', math.min(call('ZCARD', key('queue-waiting', queue)), 10001)} end
end

function queues.exists(name)
  return call('EXISTS', key('queue', name)) == 1
end

-- Return the fields of the row of a run that begins to wait, flat.
function queues.waiting_fields(requested)
  return {
    'queue', requested[1], 'partition', requested[2], 'priority', tostring(requested[3]), 'place', 'waiting', 'gate', '',
    'owner', '', 'wake_at', '',
  }
end

-- Changes of runs

-- Adapt a change of the row of a run with a place: an end deletes the place, and nothing makes a waiting run due.
function queues.adapt_change(row, fields)
  if fields.status and TERMINAL[fields.status] then
    places.remove(row.id)
    fields.place, fields.gate = '', ''
  elseif row.place == 'waiting' and not fields.place and fields.wake_at then
    fields.wake_at = ''
  end
end

-- Hold a waiting run that gets a pause, and end the hold with a resume or a cancel.
function queues.apply_message(row, kind, paused_state)
  if kind == 'pause' then
    run_rows.change(row, {held_kind = 'paused', turn_state = paused_state})
  elseif inbox.WAKES_HELD[kind] and row.held_kind ~= '' then
    run_rows.change(row, {held_kind = '', turn_state = ''})
    places.hint(row.queue)
  end
end

function queues.requeue(write)
  local _, id, queue, priority = unpack(write)
  local row, place = run_rows.read(id), places.read(id)
  if not row then return {'missing'} end
  local is_same = place and tonumber(place.priority) == priority
  if not place or place.queue ~= queue or (place.held == '1' and not is_same) then return {'not_queued'} end
  if not is_same then
    places.change(place, {priority = priority})
    run_rows.write_unindexed(row, {priority = priority})
    places.hint(queue)
  end
  return COMMITTED
end

function queues.leave(write)
  local _, id, queue, now = unpack(write)
  local row, place = run_rows.read(id), places.read(id)
  if not row then return {'missing'} end
  if not place or place.queue ~= queue then return {'not_queued'} end
  local fields = {place = '', gate = '', updated_at = now}
  if row.place == 'waiting' then
    fields.wake_at, fields.held_kind, fields.turn_state = now, '', ''
  end
  places.remove(id)
  run_rows.change(row, fields)
  mark_changed(id)
  return COMMITTED
end

-- Settings

function queues.configure(write)
  local _, name, base, declared, override, paused = unpack(write)
  local hash = key('queue', name)
  local found = call('HMGET', hash, 'version', 'declared', 'override', 'paused')
  local version = tonumber(found[1] or '0')
  if version > 0 and found[2] == declared and found[3] == override and found[4] == paused then
    return {'versioned', version}
  end
  if version ~= base then return {'superseded'} end
  call('HSET', hash, 'version', version + 1, 'declared', declared, 'override', override, 'paused', paused)
  call('ZADD', key('queues'), 0, name)
  places.clear_limits(name)
  places.hint(name)
  return {'versioned', version + 1}
end

function queues.configure_partition(write)
  local _, queue, partition, override = unpack(write)
  if not queues.exists(queue) then return {'queue_missing'} end
  local stored = call('HGET', key('queue-partition', queue, partition), 'override') or ''
  if stored == override then return {'versioned', tonumber(call('HGET', key('queue', queue), 'version'))} end
  places.store_partition(queue, partition, 'override', override, 'limit', '', 'ready_at', '')
  places.hint(queue)
  return {'versioned', call('HINCRBY', key('queue', queue), 'version', 1)}
end

-- Admissions

local function is_clock_wrong(now, tolerance, store_now)
  if tolerance == '' then return false end
  local time = call('TIME')
  local at = store_now == '' and time[1] + time[2] / 1000000 or tonumber(store_now)
  return math.abs(tonumber(now) - at) > tonumber(tolerance)
end

-- Return whether the place of this run may be taken; otherwise the admission skips it.
local function is_admissible(row, place, now, serves)
  if place.expires_at ~= '' and tonumber(place.expires_at) <= tonumber(now) then return false end
  return row.place == 'waiting' and row.held_kind == '' and serves[row.workflow .. NUL .. row.version .. NUL .. row.pool]
end

-- Take the first runs of a partition that may be admitted; add their ids to `admitted` and return how many.
local function take(queue, partition, count, now, serves, gate, scan, admitted)
  local taken = 0
  local examined = count > 0 and call('ZRANGE', key('waiting-places', queue, partition), 0, scan - 1) or {}
  for _, id in ipairs(examined) do
    if taken == count then break end
    local row, place = run_rows.read(id), places.read(id)
    if not place then
      call('ZREM', key('waiting-places', queue, partition), id) -- its row is missing
    elseif not row then
      places.remove(id)
    elseif is_admissible(row, place, now, serves) then
      places.change(place, {held = '1', admitted_at = now})
      run_rows.change(row, {place = 'held', wake_at = now, gate = gate, updated_at = now})
      mark_changed(id)
      taken = taken + 1
      admitted[#admitted + 1] = id
    end
  end
  return taken
end

local function promote(queue, now, limit)
  local due = call('ZRANGEBYSCORE', key('delayed', queue), '-inf', now, 'LIMIT', 0, limit)
  for _, member in ipairs(due) do
    local place = places.read(string.sub(member, 17))
    if place and place.eligible_at ~= '' then
      places.promote(place)
    else
      call('ZREM', key('delayed', queue), member) -- its row is missing or damaged
      if place and place.held ~= '1' then places.change(place, {}) end
    end
  end
  return #due
end

function queues.admit(write)
  local _, queue, base, now, state, takes, served, gated, full, promoted, scan, tolerance, store_now = unpack(write)
  local hash, admitted, serves = key('queue', queue), {}, {}
  local version, last_turn = unpack(call('HMGET', hash, 'version', 'last_turn'))
  if not version then return {'queue_missing'} end
  if tonumber(version) ~= base or is_clock_wrong(now, tolerance, store_now) then return {'superseded'} end
  for _, each in ipairs(served) do serves[each] = true end
  last_turn = tonumber(last_turn or '0') or 0
  promoted = promoted > 0 and promote(queue, now, promoted) or 0
  for _, each in ipairs(takes) do
    local partition, count, turn, partition_state, limit, ready_at, keep_until = unpack(each)
    places.add_partition(queue, partition)
    local taken = take(queue, partition, count, now, serves, gated and queue or '', scan, admitted)
    places.store_partition(
      queue, partition, 'turn', turn, 'state', partition_state, 'taken', taken, 'limit', limit, 'ready_at', ready_at,
      'keep_until', keep_until
    )
    last_turn = math.max(last_turn, turn)
    call('HSET', hash, 'last_turn', last_turn)
  end
  call('HSET', hash, 'state', state, 'taken', #admitted, 'full', full and '1' or '0')
  return {'admitted', admitted, promoted, call('HINCRBY', hash, 'version', 1)}
end
