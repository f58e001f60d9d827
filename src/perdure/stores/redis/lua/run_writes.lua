-- Module `run_writes`: the writes that every run needs: create it and commit its turns.
--
-- Every write checks everything before its first change, and cannot fail after that: Lua has no rollback.
-- Keys: run:<id>, entries:<id>, inbox:<id>, message-numbers:<id>, serials:<id>, observers:<id>; the indexes by
-- `run_rows.lua`.

local function extend(flat, ...)
  local size = #flat
  for i = 1, select('#', ...) do flat[size + i] = (select(i, ...)) end
end

-- Return the result for a run that the same call has created before.
local function created_before(id, owner, observer)
  if #observer > 0 then
    local found = call('HMGET', RUN .. id, 'status', 'turn_state')
    if TERMINAL[found[1]] then return {'ended_with_result', found[1], found[2] or ''} end
    run_rows.add_observer(id, observer)
  end
  return CREATED + (owner ~= '' and call('HGET', RUN .. id, 'owner') == owner and 1 or 0)
end

-- Return the row of the run that a new one replaces; nothing if it must stay.
local function read_predecessor(id, created_by, replaces)
  if #replaces == 0 or created_by ~= replaces[1] then return end
  local row = run_rows.read(id)
  if not row or row.generation ~= replaces[2] or not TERMINAL[row.status] or row.unfinalized == '1' then return end
  return row
end

function run_writes.create(write)
  local _, id, created_by, owner, created_at, wake_at, fields, entries, messages, observer, received, replaces, requested,
    by_worker = unpack(write)
  if by_worker ~= '' and not is_alive(by_worker) then return {'superseded'} end
  local by = call('HGET', RUN .. id, 'created_by')
  local predecessor = read_predecessor(id, by, replaces)
  if by and not predecessor then
    if by ~= created_by then return {'exists', call('HGETALL', RUN .. id)} end
    return created_before(id, owner, observer)
  end
  local refused = #requested > 0 and queues.refuse(requested, created_by, fields, created_at)
  if refused then return refused end
  local position, last_message_no
  if predecessor then
    position, last_message_no = run_rows.position(predecessor), tonumber(predecessor.last_message_no)
    run_rows.delete(predecessor)
  end
  set_all(ENTRIES .. id, entries)
  last_message_no = last_message_no or received
  local pending_events = 0
  for nth, given in ipairs(messages) do
    local number = last_message_no + nth
    local message_id, kind, value, topic, partition, offset = unpack(given)
    call('HSET', key('inbox', id), number, value)
    call('HSET', key('message-numbers', id), message_id, number)
    if inbox.COUNTED[kind] then pending_events = pending_events + 1 end
    if kind == 'assignment' then
      call('HSET', key('serials', id), message_id, '0:' .. partition)
      outbox.add(partition, {'mark_seen', topic, offset, id})
    end
  end
  extend(fields, 'id', id, 'created_by', created_by, 'created_at', created_at)
  last_message_no = last_message_no + #messages
  if last_message_no > 0 then extend(fields, 'last_message_no', last_message_no, 'pending_events', pending_events) end
  if position then extend(fields, 'fence', position + 1, 'skipped', position + 1) end
  if #observer > 0 then
    call('ZADD', key('observers', id), 1, cmsgpack.pack(observer))
    extend(fields, 'last_observer_no', '1')
  end
  if #requested > 0 then
    extend(fields, 'status', 'pending', unpack(queues.waiting_fields(requested)))
    run_rows.insert(id, fields)
    places.add(id, requested, created_at)
    return CREATED
  end
  if is_alive(owner) then
    extend(fields, 'status', 'running', 'owner', owner, 'first_executed_at', created_at)
    run_rows.insert(id, fields)
    return CREATED + 1
  end
  extend(fields, 'status', 'pending', 'wake_at', wake_at)
  run_rows.insert(id, fields)
  mark_changed(id)
  return CREATED
end

-- Add the changes of a run that continues as new to `fields`.
local function add_restart(row, restart, fields)
  local found = call('HMGET', RUN .. row.id, 'original_workflow', 'original_input', 'input', 'epoch')
  if not found[1] then fields.original_workflow = row.workflow end
  if not found[2] then fields.original_input = found[3] end
  fields.generation = tonumber(row.generation) + 1
  fields.epoch = tonumber(found[4] or '0') + 1
  for i = 1, #restart, 2 do fields[restart[i]] = restart[i + 1] end
end

-- Return the fields that a patch changes. `only_held`: only messages that wake a held run make the run due.
local function patch_fields(row, patch, now, seen)
  local status, owner, wake_at, turn_state, held_kind, drift, recoveries, ended_at, prune_at, only_held, error_type =
    unpack(patch)
  local unseen, ended = history.has_messages(row, seen, only_held), TERMINAL[status]
  if ended then
    owner, wake_at = '', ''
  elseif unseen then
    wake_at = now
  end
  if ended or (owner == '' and wake_at ~= '') then mark_changed(row.id) end
  return {
    status = status, owner = owner, wake_at = wake_at, turn_state = turn_state, held_kind = held_kind, drift = drift,
    recoveries = recoveries, ended_at = ended_at, prune_at = prune_at, updated_at = now,
    has_new_messages = unseen and owner ~= '' and '1' or '0',
    unfinalized = ended and run_rows.needs_finalization(row, row.orphaned_children) or '0',
    error_type = ended and error_type ~= '' and error_type or nil,
  }
end

-- A run that ends or continues as new (`over`) unsubscribes first. Otherwise an assignment that it releases here could
-- come back to one of its own subscriptions.
local function unsubscribe_and_release(row, extras, now, over)
  if over and call('EXISTS', key('subscriptions', row.id)) == 1 then inbox.unsubscribe_all(row) end
  if not extras then return end
  for _, target in ipairs(extras[2]) do inbox.unsubscribe(row, target) end
  inbox.release_assignments(row, extras[3], now)
end

local function write_outputs(row, extras)
  streams.publish_values(row, extras[5])
  streams.append(row.id, extras[6])
  dead_letters.add(extras[7])
  if extras[9] then run_index.change_tags(row, extras[9]) end
end

-- Apply a turn that changes more than its history.
local function apply_full_turn(row, seen, added, full)
  local now, last, consumed, patch, restart, extras, over = unpack(full)
  local id, drops, fields = row.id, extras and #extras[1] > 0, {}
  if restart then
    call('DEL', ENTRIES .. id)
  elseif drops then
    history.drop_entries(id, extras[1], true)
  end
  local replaced = extras and #extras[8] > 0
  for _, position in ipairs(replaced and extras[8] or {}) do call('HDEL', ENTRIES .. id, position) end
  set_all(ENTRIES .. id, added)
  if #consumed > 0 then inbox.consume(row, consumed, now) end
  unsubscribe_and_release(row, extras, now, over)
  if patch then
    fields = patch_fields(row, patch, now, seen)
  elseif row.has_new_messages == '1' and not history.has_messages(row, seen) then
    fields = {wake_at = '', has_new_messages = '0'}
  end
  if restart then add_restart(row, restart, fields) end
  if restart or drops then fields.fence = last end
  if restart or drops or replaced then fields.skipped = run_rows.count_skipped(id, last) end
  run_rows.change(row, fields)
  if extras then
    write_outputs(row, extras)
    if not over then inbox.subscribe(row, extras[4], now) end
  end
  if restart then streams.start_generation(id) end
end

-- Commit a turn; the acceptance rule is in `history.check_turn`.
function run_writes.turn(write)
  local _, id, _, _, _, _, seen, added, full = unpack(write)
  local row = run_rows.read(id)
  local result = history.check_turn(row, write)
  if result then return result end
  apply_full_turn(row, seen, added, full) -- rule 7
  local handled = handle_messages() -- a new subscription may have found an event, which the turn has not seen
  return history.committed_result(handled and run_rows.read_core(id) or row, seen)
end

-- Commit a turn that only adds entries: position, value, position, value ... It leaves the row and its indexes as they
-- are, unless the turn has now seen all messages.
function run_writes.step(write)
  local id, seen, added = write[2], write[7], write[8]
  local row = run_rows.read_core(id)
  local result = history.check_turn(row, write)
  if result then return result end
  set_all(ENTRIES .. id, added) -- rule 7
  if row.has_new_messages == '1' and not history.has_messages(row, seen) then
    run_rows.change(run_rows.read(id), {wake_at = '', has_new_messages = '0'})
  end
  return history.committed_result(row, seen)
end
