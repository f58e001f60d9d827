-- The other writes of a batch, one function each. Every one decides before it changes anything, and none can fail after
-- that.

function writes.deliver(write)
  local _, id, message_id, kind, value, now, limit = unpack(write)
  local row = mailed_row and mailed_row.id == id and mailed_row or rows.read(id)
  mailed_row = row
  if not row then return {'missing'} end
  local number = call('HGET', key('message-numbers', id), message_id)
  if number then return {'delivered', tonumber(number), 0, row.owner} end
  if TERMINAL[row.status] then return {'ended', row.status} end
  if limit >= 0 and mail.COUNTED[kind] and tonumber(row.pending) >= limit then return {'full', tonumber(row.pending)} end
  return {'delivered', mail.add(row, message_id, kind, value, now), 1, row.owner}
end

-- `fields` say how the row of an ended run reads.
writes['end'] = function(write)
  local _, id, turn_id, now, only_if_not_started, marker, fields_flat = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > 0 and history.has_turn(id, position, turn_id) then return COMMITTED end
  if TERMINAL[row.status] then return {'ended', row.status} end
  if only_if_not_started and rows.begun(row) then return {'begun'} end
  call('HSET', ENTRIES .. id, position + 1, marker)
  mail.unsubscribe_all(row)
  local fields = {fence = position + 1, orphans = rows.begun(row) and '1' or '0'}
  for i = 1, #fields_flat, 2 do fields[fields_flat[i]] = fields_flat[i + 1] end
  fields.unsettled = rows.owes(row, fields.orphans)
  rows.change(row, fields)
  tell(id)
  return COMMITTED
end

function writes.release(write)
  local _, id, worker, now = unpack(write)
  local row = rows.read(id)
  if not row or TERMINAL[row.status] or not alive(worker) then return {'superseded'} end
  if row.owner ~= '' and row.owner ~= worker then return {'superseded'} end
  if row.owner ~= '' then rows.release(row, now, false) end
  return COMMITTED
end

function writes.observe(write)
  local _, id, observer, target = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'standing')
  if not found[1] then return {'missing'} end
  if TERMINAL[found[1]] then return {'ended', found[1], found[2] or ''} end
  rows.observe(id, {observer, target})
  return {'observing'}
end

function writes.rewind(write)
  local _, id, base, turn_id, now, dropped, added, returned, fields_flat = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and history.has_turn(id, base + 1, turn_id) then return COMMITTED end
  if position ~= base then return {'superseded'} end
  local last = base + #added / 2
  history.drop(id, dropped, false)
  set_all(ENTRIES .. id, added)
  for _, location in ipairs(dropped) do shown.supersede(id, location) end
  mail.unsubscribe_all(row)
  mail.take_again(row, returned, now)
  local fields = {
    fence = last, skipped = rows.skipped(id, last), generation = tonumber(row.generation) + 1,
    status = rows.begun(row) and 'running' or 'pending',
  }
  for i = 1, #fields_flat, 2 do fields[fields_flat[i]] = fields_flat[i + 1] end
  rows.change(row, fields)
  tell(id)
  return COMMITTED
end

-- Nothing is done to a run that owes nothing: it was settled before, or has been rewound meanwhile.
-- Nothing but who was told is ticked off.
function writes.tell(write)
  local _, id, told = unpack(write)
  local row = rows.glance_at_end(id)
  if not row then return {'missing'} end
  if row.unsettled ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(told) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  if rows.owes(row, row.orphans) == '0' then rows.settle(row) end
  return COMMITTED
end

function writes.settle(write)
  local _, id, now, told, consumed, returned, undelivered, orphans, moved = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  if row.unsettled ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(told) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  mail.consume(row, consumed, now)
  mail.give_back(row, returned, now)
  mail.move(row, moved, now)
  letters.keep(undelivered)
  local left = orphans and '0' or row.orphans
  rows.change(row, {orphans = left, unsettled = rows.owes(row, left)})
  return COMMITTED
end

function writes.publish(write) return topics.publish(write) end
function writes.fan_out(write) return topics.fan_out(write) end
function writes.replay(write) return letters.replay(write) end

function writes.append(write)
  local _, id, worker, items, first = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'owner')
  if not found[1] then return {'missing'} end
  local refused = history.refusal(found[1], found[2], worker, true)
  if refused then return refused end
  shown.append(id, shown.fresh(id, items, first))
  return COMMITTED
end

function writes.supersede(write)
  local _, id, location, writer = unpack(write)
  if call('EXISTS', RUN .. id) == 0 then return {'missing'} end
  shown.supersede(id, location, writer)
  return COMMITTED
end

-- A post from another slice.
function writes.post(write)
  posts.handle(cmsgpack.unpack(write[2]))
  return COMMITTED
end
