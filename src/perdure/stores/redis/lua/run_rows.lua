-- Module `run_rows`: the row of a run, and the indexes over all rows of the partition.
--
-- Keys: run:<id> (hash: the row), observers:<id> (sorted set of {run, target}). Indexes, all sorted sets of run ids:
-- status:<status>, children:<parent>, open-children:<parent>, and for the next action: due:<queue>, owned:<worker>,
-- owned-with-messages:<worker>, held:<kind, workflow, version>, unfinalized, prunable; slots:<queue> (holders of slots by
-- the time from which they are active); for queries: held-runs, and those of `run_index.lua`.
-- A run is in exactly one of due, owned, unfinalized and prunable, or in none while it waits for a message. Rows are
-- changed only by this module, so that row and indexes always agree.

local queued = {} -- like `stale_queues`, but with all queues that were looked up
-- Reused by every change, and large enough: growing a table costs more than filling it.
local changes = {'', '', '', '', '', '', '', '', '', '', '', '', '', '', '', ''}

-- Return the fields of a row that Lua uses, with their defaults. A field at its default is not stored. `queue`, `gate` and
-- `error_type`, which few runs have, are nil then: with them the table of a new run would grow once more.
local function blank(id)
  return {
    id = id, status = 'pending', owner = '', has_new_messages = '0', last_message_no = '0', pending_events = '0',
    skipped = '0', wake_at = '', pool = 'default', workflow = '', version = '', shard = '', held_kind = '', parent = '',
    attached = '0', created_at = '', first_executed_at = '', generation = '0', recoveries = '0', drift = EMPTY,
    last_observer_no = '0', ended_at = '', prune_at = '', unfinalized = '0', orphaned_children = '0',
    counted_events = '', place = '',
  }
end

local FIELDS = {
  'status', 'owner', 'has_new_messages', 'last_message_no', 'pending_events', 'skipped', 'wake_at', 'pool', 'workflow',
  'version', 'shard', 'held_kind', 'parent', 'attached', 'created_at', 'first_executed_at', 'generation', 'recoveries',
  'drift', 'last_observer_no', 'counted_events', 'place',
}
local QUEUE_FIELDS = {'queue', 'gate'} -- only of runs with a place in a queue
local END_FIELDS = {'ended_at', 'prune_at', 'unfinalized', 'orphaned_children', 'error_type'} -- only of ended runs

local function fill(row, fields)
  local found = call('HMGET', RUN .. row.id, unpack(fields))
  for i = 1, #fields do
    if found[i] then row[fields[i]] = found[i] end
  end
  return found[1]
end

-- Return the row, or nil if there is no such run.
function run_rows.read(id)
  local row = blank(id)
  if not fill(row, FIELDS) then return nil end
  if TERMINAL[row.status] then fill(row, END_FIELDS) end
  if row.place ~= '' then fill(row, QUEUE_FIELDS) end
  return row
end

-- Return only the fields that are needed to add to the history, or nil.
function run_rows.read_core(id)
  local found = call('HMGET', RUN .. id, 'status', 'owner', 'has_new_messages', 'last_message_no', 'skipped')
  if not found[1] then return nil end
  return {
    id = id, status = found[1], owner = found[2] or '', has_new_messages = found[3], last_message_no = found[4] or '0',
    skipped = found[5] or '0',
  }
end

-- Return only the fields that are needed to finalize an ended run, or nil.
function run_rows.read_end(id)
  local row = {
    id = id, orphaned_children = '0', pending_events = '0', last_observer_no = '0', unfinalized = '0', ended_at = '',
    prune_at = '',
  }
  local fields = {
    'status', 'orphaned_children', 'pending_events', 'last_observer_no', 'unfinalized', 'ended_at', 'prune_at',
  }
  return fill(row, fields) and row
end

-- Return the last position of the history. Each entry takes one position, so that entries can be counted; `skipped` is
-- the number of positions without an entry (dropped, or never written). A position is never given twice.
function run_rows.position(row)
  return call('HLEN', ENTRIES .. row.id) + tonumber(row.skipped)
end

function run_rows.count_skipped(id, position)
  return position - call('HLEN', ENTRIES .. id)
end

function run_rows.has_started(row)
  return row.first_executed_at ~= '' or (tonumber(row.generation) or 0) > 0
end

-- Return whether a worker can own the run: its row exists, agrees with the due queue, and its numbers can be read.
function run_rows.is_claimable(row)
  if not row or row.owner ~= '' or row.wake_at == '' or TERMINAL[row.status] then return false end
  if row.place == 'waiting' then return false end
  return tonumber(row.last_message_no) and tonumber(row.skipped) and tonumber(row.wake_at) and tonumber(row.created_at)
end

-- Indexes. Each function returns the key of the index that has the run, and its score; nothing if none has it.

local function by_status(row)
  return key('status', row.status), row.created_at
end

-- The next action is due for: finalization, pruning, the owner, or the worker that claims the run.
local function by_next_action(row)
  if TERMINAL[row.status] then
    if row.unfinalized == '1' then return key('unfinalized'), row.ended_at end
    if row.prune_at ~= '' then return key('prunable'), row.prune_at end
  elseif row.owner ~= '' then
    return key('owned', row.owner), '0'
  elseif row.wake_at ~= '' then
    local queue = row.workflow .. NUL .. row.version .. NUL .. row.shard
    if (row.gate or '') ~= '' then queue = queue .. NUL .. row.gate end
    local name = key('due', row.pool, queue)
    queued[name] = {row.pool, queue}
    return name, row.wake_at
  end
end

-- What may bring the next action forward: new messages for the owner, or new code for a held run.
local function by_wake_cause(row)
  if TERMINAL[row.status] then return end
  if row.owner ~= '' then
    if row.has_new_messages == '1' then return key('owned-with-messages', row.owner), '0' end
  elseif row.held_kind ~= '' and row.place ~= 'waiting' then
    return key('held', row.held_kind, row.workflow, row.version), '0'
  end
end

local function by_parent(row)
  if row.attached == '1' and row.parent ~= '' and not TERMINAL[row.status] then
    return key('open-children', row.parent), '0'
  end
end

-- A run that is executed again after a hold keeps `held_kind` until its next suspension.
local function by_hold(row)
  if row.held_kind ~= '' and row.status == 'suspended' then return key('held-runs'), row.created_at end
end

local function by_workflow(row)
  return key('workflow', row.workflow), row.created_at
end

local function by_internal(row)
  if is_internal(row.workflow) then return key('internal'), row.created_at end
end

local function by_queue(row)
  if (row.queue or '') ~= '' then return key('run-queue', row.queue), row.created_at end
end

local function by_end(row)
  if TERMINAL[row.status] and row.ended_at ~= '' then return key('ended'), row.ended_at end
end

local function by_error(row)
  if TERMINAL[row.status] and (row.error_type or '') ~= '' then return key('error', row.error_type), row.created_at end
end

-- A slot is active while its run has an owner, and from the time at which the run is due.
local function by_slot(row)
  if row.place ~= 'held' or TERMINAL[row.status] then return end
  return key('slots', row.queue), row.owner ~= '' and '-inf' or row.wake_at ~= '' and row.wake_at or '+inf'
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

-- Insert a new run; `flat` is the fields of its row.
function run_rows.insert(id, flat)
  local row = blank(id)
  for i = 1, #flat, 2 do row[flat[i]] = flat[i + 1] end
  set_all(RUN .. id, flat)
  move(id, nil, nil, by_status(row))
  move(id, nil, nil, by_next_action(row))
  move(id, nil, nil, by_parent(row))
  move(id, nil, nil, by_hold(row))
  call('ZADD', key('workflow', row.workflow), row.created_at, id)
  move(id, nil, nil, by_internal(row))
  if row.queue then move(id, nil, nil, by_queue(row)) end
  if row.tags then run_index.add_tags(id, row.created_at, cmsgpack.unpack(row.tags)) end
  if row.parent ~= '' then call('ZADD', key('children', row.parent), row.created_at, id) end
end

-- Write the fields (field -> text) that differ; return whether there are any.
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

-- Change fields that no index depends on.
run_rows.write_unindexed = write_changes

-- Change any fields, and move the run between the indexes.
function run_rows.change(row, fields)
  local slot, slot_score = by_slot(row)
  if row.place ~= '' then queues.adapt_change(row, fields) end
  local status, created_at = by_status(row)
  local action, action_score = by_next_action(row)
  local cause, cause_score = by_wake_cause(row)
  local parent, parent_score = by_parent(row)
  local hold, hold_score = by_hold(row)
  local workflow, internal, was_ended = row.workflow, by_internal(row), TERMINAL[row.status]
  local ended, ended_score = by_end(row)
  local failed, failed_score = by_error(row)
  if not write_changes(row, fields) then return end
  move(row.id, status, created_at, by_status(row))
  move(row.id, action, action_score, by_next_action(row))
  move(row.id, cause, cause_score, by_wake_cause(row))
  move(row.id, parent, parent_score, by_parent(row))
  move(row.id, hold, hold_score, by_hold(row))
  if row.workflow ~= workflow then
    move(row.id, key('workflow', workflow), nil, by_workflow(row))
    move(row.id, internal, row.created_at, by_internal(row))
  end
  if was_ended or TERMINAL[row.status] then
    move(row.id, ended, ended_score, by_end(row))
    move(row.id, failed, failed_score, by_error(row))
  end
  if slot or row.place ~= '' then move(row.id, slot, slot_score, by_slot(row)) end
end

-- Let an ended run begin to wait in a queue: the other fields change as given.
function run_rows.wait_again(row, fields)
  row.queue = call('HGET', RUN .. row.id, 'queue') or ''
  local queue, created_at = by_queue(row)
  run_rows.change(row, fields)
  move(row.id, queue, created_at, by_queue(row))
end

-- Add a run to the index `held-runs` if it is held. For stores that were created before the index.
function run_rows.index_hold(row)
  move(row.id, nil, nil, by_hold(row))
end

-- Mark an ended run as finalized, with a row from `read_end`: it can be pruned now.
function run_rows.mark_finalized(row)
  local action, action_score = by_next_action(row)
  write_changes(row, {unfinalized = '0'})
  move(row.id, action, action_score, by_next_action(row))
end

-- Delete a run that has ended and was finalized, with all that it owns.
function run_rows.delete(row)
  local action = by_next_action(row)
  call('ZREM', by_status(row), row.id)
  if action then call('ZREM', action, row.id) end -- a run without `prune_at` is in none
  run_index.delete(row)
  if row.parent ~= '' then call('ZREM', key('children', row.parent), row.id) end
  inbox.delete(row.id)
  streams.delete(row.id)
  call('DEL', RUN .. row.id, ENTRIES .. row.id, key('observers', row.id))
end

function run_rows.release(row, now, recovered)
  run_rows.change(row, {
    owner = '', has_new_messages = '0', wake_at = now, updated_at = now,
    status = run_rows.has_started(row) and 'running' or 'pending',
    recoveries = (tonumber(row.recoveries) or 0) + (recovered and 1 or 0),
  })
  mark_changed(row.id)
end

-- Return '1' if an ended run needs finalization: it has children to end, unread events, or observers to notify. Until
-- that is done the run stays in the index `unfinalized` and is not pruned.
function run_rows.needs_finalization(row, orphaned_children)
  if orphaned_children == '1' or tonumber(row.pending_events) > 0 then return '1' end
  return row.last_observer_no ~= '0' and call('EXISTS', key('observers', row.id)) == 1 and '1' or '0'
end

function run_rows.add_observer(id, observer)
  local number = call('HINCRBY', RUN .. id, 'last_observer_no', 1)
  call('ZADD', key('observers', id), 'NX', number, cmsgpack.pack(observer))
end
