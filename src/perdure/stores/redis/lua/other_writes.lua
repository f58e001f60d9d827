-- Module `other_writes`: all writes of a batch except those of `run_writes.lua`, one function each.
--
-- Every write checks everything before its first change, and cannot fail after that: Lua has no rollback.
-- Keys: run:<id>, entries:<id>, observers:<id>, message-numbers:<id>; the others by the modules called here.

function other_writes.deliver(write)
  local _, id, message_id, kind, value, now, limit, paused_state = unpack(write)
  local row = delivered_row and delivered_row.id == id and delivered_row or run_rows.read(id)
  delivered_row = row
  if not row then return {'missing'} end
  local number = call('HGET', key('message-numbers', id), message_id)
  if number then return {'delivered', tonumber(number), 0, row.owner} end
  if TERMINAL[row.status] then return {'ended', row.status} end
  local unread = limit >= 0 and inbox.COUNTED[kind] and inbox.unread_if_full(row, value, limit)
  if unread then return {'full', unread} end
  return {'delivered', inbox.add(row, message_id, kind, value, now, paused_state), 1, row.owner}
end

-- End a run from outside. It takes a position, so that a turn that a worker is computing meanwhile is rejected (rule 6
-- of the acceptance rule). `flat_fields` are the fields of the row of an ended run.
other_writes['end'] = function(write)
  local _, id, turn_id, now, only_if_not_started, marker, flat_fields = unpack(write)
  local row = run_rows.read(id)
  if not row then return {'missing'} end
  local position = run_rows.position(row)
  if position > 0 and history.has_turn(id, position, turn_id) then return COMMITTED end
  if TERMINAL[row.status] then return {'ended', row.status} end
  if only_if_not_started and run_rows.has_started(row) then return {'already_started'} end
  call('HSET', ENTRIES .. id, position + 1, marker)
  inbox.unsubscribe_all(row)
  local fields = {fence = position + 1, orphaned_children = run_rows.has_started(row) and '1' or '0'}
  for i = 1, #flat_fields, 2 do fields[flat_fields[i]] = flat_fields[i + 1] end
  fields.unfinalized = run_rows.needs_finalization(row, fields.orphaned_children)
  run_rows.change(row, fields)
  mark_changed(id)
  return COMMITTED
end

function other_writes.release(write)
  local _, id, worker, now = unpack(write)
  local row = run_rows.read(id)
  if not row or TERMINAL[row.status] or not is_alive(worker) then return {'superseded'} end
  if row.owner ~= '' and row.owner ~= worker then return {'superseded'} end
  if row.owner ~= '' then run_rows.release(row, now, false) end
  return COMMITTED
end

function other_writes.observe(write)
  local _, id, observer, target = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'turn_state')
  if not found[1] then return {'missing'} end
  if TERMINAL[found[1]] then return {'ended_with_result', found[1], found[2] or ''} end
  run_rows.add_observer(id, {observer, target})
  return {'observing'}
end

function other_writes.rewind(write)
  local _, id, base, turn_id, now, dropped, added, returned, flat_fields, requested = unpack(write)
  local row = run_rows.read(id)
  if not row then return {'missing'} end
  local position = run_rows.position(row)
  if position > base and history.has_turn(id, base + 1, turn_id) then return COMMITTED end
  if position ~= base then return {'superseded'} end
  local is_placed = #requested > 0 and TERMINAL[row.status]
  if is_placed and not queues.exists(requested[1]) then return {'queue_missing'} end
  local last = base + #added / 2
  history.drop_entries(id, dropped, false)
  set_all(ENTRIES .. id, added)
  for _, location in ipairs(dropped) do streams.supersede(id, location) end
  inbox.unsubscribe_all(row)
  inbox.restore_messages(row, returned, now)
  local fields = {
    fence = last, skipped = run_rows.count_skipped(id, last), generation = tonumber(row.generation) + 1,
    status = run_rows.has_started(row) and 'running' or 'pending', error_type = row.error_type and '' or nil,
  }
  for i = 1, #flat_fields, 2 do fields[flat_fields[i]] = flat_fields[i + 1] end
  if is_placed then
    local waiting = queues.waiting_fields(requested)
    for i = 1, #waiting, 2 do fields[waiting[i]] = waiting[i + 1] end
    run_rows.wait_again(row, fields)
    places.add(id, requested, now)
  else
    run_rows.change(row, fields)
  end
  mark_changed(id)
  return COMMITTED
end

-- Finalization of an ended run. Both writes change nothing if the run needs no finalization: it was finalized before,
-- or was rewound meanwhile. That makes them idempotent, so that two workers may finalize the same run. A run leaves the
-- index `unfinalized` only when nothing is pending; until then some worker finds it there again after a crash.

-- Finalization that only marks observers as notified. It reads a part of the row, because this is the common case.
function other_writes.mark_notified(write)
  local _, id, notified = unpack(write)
  local row = run_rows.read_end(id)
  if not row then return {'missing'} end
  if row.unfinalized ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(notified) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  if run_rows.needs_finalization(row, row.orphaned_children) == '0' then run_rows.mark_finalized(row) end
  return COMMITTED
end

-- `orphaned_children_ended`: the attached children of a terminated run have ended.
function other_writes.finalize(write)
  local _, id, now, notified, consumed, released, undelivered, orphaned_children_ended, redirected = unpack(write)
  local row = run_rows.read(id)
  if not row then return {'missing'} end
  if row.unfinalized ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(notified) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  inbox.consume(row, consumed, now)
  inbox.release_assignments(row, released, now)
  inbox.redirect(row, redirected, now)
  dead_letters.add(undelivered)
  local orphaned_children = orphaned_children_ended and '0' or row.orphaned_children
  run_rows.change(row, {
    orphaned_children = orphaned_children, unfinalized = run_rows.needs_finalization(row, orphaned_children),
  })
  return COMMITTED
end

function other_writes.publish(write) return topics.publish(write) end
function other_writes.fan_out(write) return topics.fan_out(write) end
function other_writes.replay(write) return dead_letters.replay(write) end

-- Append to streams outside a turn. Rules 3 to 5 of the acceptance rule apply; there is no position to compare.
function other_writes.append(write)
  local _, id, worker, items, first = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'owner')
  if not found[1] then return {'missing'} end
  local refused = history.check_worker(found[1], found[2], worker, true)
  if refused then return refused end
  streams.append(id, streams.skip_appended(id, items, first))
  return COMMITTED
end

function other_writes.supersede(write)
  local _, id, location, writer = unpack(write)
  if call('EXISTS', RUN .. id) == 0 then return {'missing'} end
  streams.supersede(id, location, writer)
  return COMMITTED
end

function other_writes.document(write) return documents.put(write) end
function other_writes.admit(write) return queues.admit(write) end
function other_writes.configure_queue(write) return queues.configure(write) end
function other_writes.configure_partition(write) return queues.configure_partition(write) end
function other_writes.requeue(write) return queues.requeue(write) end
function other_writes.leave_queue(write) return queues.leave(write) end

-- Change tags of a run without an owner: key -> tag, or false to remove it.
function other_writes.tag(write)
  local _, id, changes = unpack(write)
  local found = call('HMGET', RUN .. id, 'owner', 'created_at')
  if not found[2] then return {'missing'} end
  if (found[1] or '') ~= '' then return {'superseded'} end
  run_index.change_tags({id = id, created_at = found[2]}, changes)
  return COMMITTED
end

-- A message from another partition.
function other_writes.partition_message(write)
  outbox.handle(cmsgpack.unpack(write[2]))
  return COMMITTED
end
