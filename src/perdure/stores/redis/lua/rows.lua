-- The row of a run, and the indexes over it.

local queued = {} -- as `stale_queues`, but all that were looked at
-- Used again and again, and large enough: a table that grows costs more than what is put into it.
local changes = {'', '', '', '', '', '', '', '', '', '', '', '', '', '', '', ''}

-- A row as far as Lua judges by it. A field that the hash lacks says what it says here.
local function blank(id)
  return {
    id = id, status = 'pending', owner = '', mailed = '0', last_message_no = '0', pending = '0', skipped = '0', wake_at = '',
    pool = 'default', workflow = '', version = '', shard = '', held_kind = '', parent = '', attached = '0',
    created_at = '', first_executed_at = '', generation = '0', recoveries = '0', drift = EMPTY, observer_last = '0',
    ended_at = '', prune_at = '', unsettled = '0', orphans = '0',
  }
end

local FIELDS = {
  'status', 'owner', 'mailed', 'last_message_no', 'pending', 'skipped', 'wake_at', 'pool', 'workflow', 'version', 'shard',
  'held_kind', 'parent', 'attached', 'created_at', 'first_executed_at', 'generation', 'recoveries', 'drift', 'observer_last',
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
  local found = call('HMGET', RUN .. id, 'status', 'owner', 'mailed', 'last_message_no', 'skipped')
  if not found[1] then return nil end
  return {
    id = id, status = found[1], owner = found[2] or '', mailed = found[3], last_message_no = found[4] or '0',
    skipped = found[5] or '0',
  }
end

-- As much of it as is needed to know what a run that has ended owes.
function rows.glance_at_end(id)
  local row = {
    id = id, orphans = '0', pending = '0', observer_last = '0', unsettled = '0', ended_at = '', prune_at = '',
  }
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
  return row.first_executed_at ~= '' or tonumber(row.generation) > 0
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
    queued[name] = {row.pool, queue}
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
    stale_queues[old] = queued[old]
  end
  if new then
    call('ZADD', new, new_score, id)
    stale_queues[new] = queued[new]
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

-- Whether a run that ends still owes something: news, what becomes of unread events, a word to its orphans.
function rows.owes(row, orphans)
  if orphans == '1' or tonumber(row.pending) > 0 then return '1' end
  return row.observer_last ~= '0' and call('EXISTS', key('observers', row.id)) == 1 and '1' or '0'
end

function rows.observe(id, observer)
  local number = call('HINCRBY', RUN .. id, 'observer_last', 1)
  call('ZADD', key('observers', id), 'NX', number, cmsgpack.pack(observer))
end
