-- Rooms of the Redis store that every script begins with: names of keys, framed values, the row of a run, its indexes.
--
-- A script touches the keys of one slice only, all of which begin with its hash tag (KEYS[1]). Numbers that are moments
-- travel as text, because Lua would round them when it writes them out. Empty text stands for None.

local TAG = KEYS[1]
local SLICE = tonumber(ARGV[2] or '0')
local call = redis.call
local NUL = '\0'
local EMPTY = '\144' -- MessagePack's array of nothing
local TERMINAL = {succeeded = true, failed = true, cancelled = true}
local COUNTED = {event = true, assignment = true} -- mail that has a limit, and that somebody must deal with at the end
local WAKES_HELD = {resume = true, cancel = true}

local function key(kind, name, second, third)
  local made = TAG .. ':' .. kind .. ':' .. (name or '')
  if second then made = made .. NUL .. second end
  return third and made .. NUL .. third or made
end

-- Those that are wanted most, ready made but for the id.
local RUN, ENTRIES = TAG .. ':run:', TAG .. ':entries:'

-- A framed value: what Lua reads (MessagePack), then what only Python reads.
local function framed(header, blob)
  local packed = cmsgpack.pack(header)
  return struct.pack('>I4', #packed) .. packed .. blob
end

local function header_of(value)
  local length = struct.unpack('>I4', value)
  return cmsgpack.unpack(string.sub(value, 5, 4 + length))
end

local function set_all(name, pairs_flat)
  for first = 1, #pairs_flat, 1000 do
    call('HSET', name, unpack(pairs_flat, first, math.min(first + 999, #pairs_flat)))
  end
end

local function expired(expires_at, now)
  return expires_at ~= '' and tonumber(expires_at) <= tonumber(now)
end

-- The order of bytes, which is that of sorted sets; Lua's own would depend on the server's language.
local function less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- Hints: the runs that others will want to know of.

local changed, changed_count = {}, 0

local function tell(id)
  if not changed[id] then
    changed[id] = true
    changed_count = changed_count + 1
  end
end

local function publish_hints(channel, sender)
  if changed_count == 0 then return {} end
  local ids = {}
  for id in pairs(changed) do ids[#ids + 1] = id end
  call('PUBLISH', channel, cmsgpack.pack({sender, #ids <= 200 and ids or false}))
  return ids
end

-- The row of a run and the indexes over it.

local rows = {}
local queues, stale_queues = {}, {} -- key -> what it is made of: {pool, queue}
local changes = {} -- used again and again: a table that grows costs more than what is put into it

-- A row as far as Lua judges by it. A field that the hash lacks says what it says here.
local function blank(id)
  return {
    id = id, status = 'pending', owner = '', mailed = '0', inbox_last = '0', pending = '0', skipped = '0', wake_at = '',
    pool = 'default', workflow = '', version = '', shard = '', held_kind = '', parent = '', attached = '0',
    created_at = '', begun_at = '', generation = '0', recoveries = '0', drift = EMPTY, observer_last = '0',
    ended_at = '', prune_at = '', unsettled = '0', orphans = '0',
  }
end

local FIELDS = {
  'status', 'owner', 'mailed', 'inbox_last', 'pending', 'skipped', 'wake_at', 'pool', 'workflow', 'version', 'shard',
  'held_kind', 'parent', 'attached', 'created_at', 'begun_at', 'generation', 'recoveries', 'drift', 'observer_last',
}
local FIELDS_OF_AN_END = {'ended_at', 'prune_at', 'unsettled', 'orphans'} -- only a run that has ended has them

local function fill(row, fields)
  local found = call('HMGET', RUN .. row.id, unpack(fields))
  for i = 1, #fields do
    if found[i] then row[fields[i]] = found[i] end
  end
  return found[1]
end

function rows.read(id)
  local row = blank(id)
  if not fill(row, FIELDS) then return nil end
  if TERMINAL[row.status] then fill(row, FIELDS_OF_AN_END) end
  return row
end

-- As much of it as is needed to add to the history.
function rows.glance(id)
  local found = call('HMGET', RUN .. id, 'status', 'owner', 'mailed', 'inbox_last', 'skipped')
  if not found[1] then return nil end
  return {
    id = id, status = found[1], owner = found[2] or '', mailed = found[3], inbox_last = found[4] or '0',
    skipped = found[5] or '0',
  }
end

-- As much of it as is needed to know what a run that has ended owes.
function rows.glance_at_end(id)
  local row = {id = id, orphans = '0', pending = '0', observer_last = '0', unsettled = '0', ended_at = '', prune_at = ''}
  return fill(row, {'status', 'orphans', 'pending', 'observer_last', 'unsettled', 'ended_at', 'prune_at'}) and row
end

-- A position is taken by one row of the history, so that the rows tell how many there are; those that were dropped, or
-- never had a row, are `skipped`.
function rows.position(row)
  return call('HLEN', ENTRIES .. row.id) + tonumber(row.skipped)
end

function rows.skipped(id, position)
  return position - call('HLEN', ENTRIES .. id)
end

function rows.begun(row)
  return row.begun_at ~= '' or tonumber(row.generation) > 0
end

-- The indexes are sorted sets of ids. Each of these says where one kind of them has a run: the key and the score.

local function by_status(row)
  return key('status', row.status), row.created_at
end

-- Who is to do something next: nobody but upkeep, its owner, or whoever claims it.
local function by_turn(row)
  if TERMINAL[row.status] then
    if row.unsettled == '1' then return key('unsettled'), row.ended_at end
    if row.prune_at ~= '' then return key('prunable'), row.prune_at end
  elseif row.owner ~= '' then
    return key('owned', row.owner), '0'
  elseif row.wake_at ~= '' then
    local queue = row.workflow .. NUL .. row.version .. NUL .. row.shard
    local name = key('due', row.pool, queue)
    queues[name] = {row.pool, queue}
    return name, row.wake_at
  end
end

-- What can make that sooner.
local function by_waker(row)
  if TERMINAL[row.status] then return end
  if row.owner ~= '' then
    if row.mailed == '1' then return key('mailed', row.owner), '0' end
  elseif row.held_kind ~= '' then
    return key('held', row.held_kind, row.workflow, row.version), '0'
  end
end

local function by_parent(row)
  if row.attached == '1' and row.parent ~= '' and not TERMINAL[row.status] then
    return key('open-children', row.parent), '0'
  end
end

local function move(id, old, old_score, new, new_score)
  if old == new and old_score == new_score then return end
  if old and old ~= new then
    call('ZREM', old, id)
    stale_queues[old] = queues[old]
  end
  if new then
    call('ZADD', new, new_score, id)
    stale_queues[new] = queues[new]
  end
end

-- A new run, with the fields of its row.
function rows.add(id, flat)
  local row = blank(id)
  for i = 1, #flat, 2 do row[flat[i]] = flat[i + 1] end
  set_all(RUN .. id, flat)
  move(id, nil, nil, by_status(row))
  move(id, nil, nil, by_turn(row))
  move(id, nil, nil, by_parent(row))
  if row.parent ~= '' then call('ZADD', key('children', row.parent), row.created_at, id) end
end

-- Write the fields (field -> text) that differ; whether there are any.
local function write_changes(row, fields)
  local count = 0
  for field, value in pairs(fields) do
    value = tostring(value)
    if row[field] ~= value then
      changes[count + 1], changes[count + 2] = field, value
      count = count + 2
      row[field] = value
    end
  end
  if count > 0 then call('HSET', RUN .. row.id, unpack(changes, 1, count)) end
  return count > 0
end

-- Change fields that no index is made of.
rows.note = write_changes

-- The only way to change a row that is indexed.
function rows.change(row, fields)
  local status, created_at = by_status(row)
  local turn, turn_score = by_turn(row)
  local waker, waker_score = by_waker(row)
  local parent, parent_score = by_parent(row)
  if not write_changes(row, fields) then return end
  move(row.id, status, created_at, by_status(row))
  move(row.id, turn, turn_score, by_turn(row))
  move(row.id, waker, waker_score, by_waker(row))
  move(row.id, parent, parent_score, by_parent(row))
end

-- A run that has ended owes nothing any more.
function rows.settle(row)
  local turn, turn_score = by_turn(row)
  write_changes(row, {unsettled = '0'})
  move(row.id, turn, turn_score, by_turn(row))
end

-- A run that has ended, and settled.
function rows.forget(row)
  call('ZREM', by_status(row), row.id)
  call('ZREM', by_turn(row), row.id)
  if row.parent ~= '' then call('ZREM', key('children', row.parent), row.id) end
end

function rows.release(row, now, recovered)
  rows.change(row, {
    owner = '', mailed = '0', wake_at = now, updated_at = now,
    status = rows.begun(row) and 'running' or 'pending',
    recoveries = tonumber(row.recoveries) + (recovered and 1 or 0),
  })
  tell(row.id)
end

-- Each pool has a sorted set of its queues by when the first run in them is due; brought up to date at a script's end.
function rows.refresh_heads()
  for name, place in pairs(stale_queues) do
    local pool, queue = place[1], place[2]
    local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')
    if first[1] then
      call('ZADD', key('heads', pool), first[2], queue)
    else
      call('ZREM', key('heads', pool), queue)
    end
  end
end

-- The earliest due runs of these workflows (`workflow NUL version`) and shards (false: all): {id, wake_at} each.
function rows.due(now, wanted, pool, shards, limit)
  local workflows, of_shard, found = {}, {}, {}
  for _, pair in ipairs(wanted) do workflows[pair] = true end
  for _, shard in ipairs(shards or {}) do of_shard[tostring(shard)] = true end
  for _, queue in ipairs(call('ZRANGEBYSCORE', key('heads', pool), '-inf', now)) do
    local pair, shard = string.match(queue, '^(.*)%z(%d+)$')
    if workflows[pair] and (not shards or of_shard[shard]) then
      local due = call('ZRANGEBYSCORE', key('due', pool, queue), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
      for i = 1, #due, 2 do found[#found + 1] = {due[i], tonumber(due[i + 1])} end
    end
  end
  table.sort(found, function(a, b)
    if a[2] ~= b[2] then return a[2] < b[2] end
    return less(a[1], b[1])
  end)
  for i = #found, limit + 1, -1 do found[i] = nil end
  return found
end

-- Workers, as far as every slice must know them.

local known_alive = {}

local function alive(worker)
  if worker == '' then return false end
  if known_alive[worker] == nil then
    known_alive[worker] = call('SISMEMBER', key('alive'), worker) == 1
  end
  return known_alive[worker]
end

local function fence_worker(worker)
  call('ZADD', key('gone'), call('TIME')[1], worker)
  call('SREM', key('alive'), worker)
end

-- Dead letters, in the order in which they came: by the server's clock, never backwards within a slice.

local function next_in_order()
  local time = call('TIME')
  local last = call('ZRANGE', key('letter-order'), -1, -1, 'WITHSCORES')
  local at = time[1] * 1000000 + time[2]
  if last[2] and tonumber(last[2]) >= at then at = tonumber(last[2]) + 1 end
  return string.format('%.0f', at)
end

-- {id, blob} each, or {id, blob, place} for one that comes back to its place in the order.
local function keep_letters(letters)
  for _, letter in ipairs(letters) do
    if call('HSETNX', key('letters'), letter[1], letter[2]) == 1 then
      call('ZADD', key('letter-order'), letter[3] or next_in_order(), letter[1])
    end
  end
end

local function remove_letter(id)
  call('ZREM', key('letter-order'), id)
  return call('HDEL', key('letters'), id)
end
