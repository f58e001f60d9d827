-- The writes of a batch, one function each. Every one decides before it changes anything, and none can fail after that.

local writes = {}

-- Delete the rows of these locations (`below`: and of all beneath them) and every marker.
local function drop_rows(id, locations, below)
  local name, wanted = ENTRIES .. id, {}
  for _, location in ipairs(locations) do wanted[location] = true end
  local found = call('HGETALL', name)
  for i = 1, #found, 2 do
    local _, location, marker = unpack(header_of(found[i + 1]))
    local goes = marker or wanted[location]
    local slash = below and not goes and string.find(location, '/', 1, true)
    while slash and not goes do
      goes = wanted[string.sub(location, 1, slash - 1)]
      slash = string.find(location, '/', slash + 1, true)
    end
    if goes then call('HDEL', name, found[i]) end
  end
end

-- Whether a run that ends still owes something: news, what becomes of unread events, a word to its orphans.
local function owes(row, orphans)
  if orphans == '1' or tonumber(row.pending) > 0 then return '1' end
  return row.observer_last ~= '0' and call('EXISTS', key('observers', row.id)) == 1 and '1' or '0'
end

-- making

local function extend(flat, more)
  for _, part in ipairs(more) do flat[#flat + 1] = part end
end

local function observe(id, observer)
  local number = call('HINCRBY', RUN .. id, 'observer_last', 1)
  call('ZADD', key('observers', id), 'NX', number, cmsgpack.pack(observer))
end

-- Made before, by the same call.
local function created_again(id, owner, observer)
  if #observer > 0 then
    local found = call('HMGET', RUN .. id, 'status', 'standing')
    if TERMINAL[found[1]] then return {'ended', found[1], found[2] or ''} end
    observe(id, observer)
  end
  return CREATED + (owner ~= '' and call('HGET', RUN .. id, 'owner') == owner and 1 or 0)
end

writes.create = function(write)
  local _, id, created_by, owner, created_at, wake_at, fields, entries, inbox, observer = unpack(write)
  local by = call('HGET', RUN .. id, 'created_by')
  if by and by ~= created_by then return {'exists', call('HGETALL', RUN .. id)} end
  if by then return created_again(id, owner, observer) end
  set_all(ENTRIES .. id, entries)
  local pending = 0
  for number, given in ipairs(inbox) do
    local message_id, kind, value, topic, slice, place = unpack(given)
    call('HSET', key('mail', id), number, value)
    call('HSET', key('message-numbers', id), message_id, number)
    if COUNTED[kind] then pending = pending + 1 end
    if kind == 'assignment' then
      call('HSET', key('serials', id), message_id, '0:' .. slice)
      post(slice, {'saw', topic, place, id})
    end
  end
  extend(fields, {'id', id, 'created_by', created_by, 'created_at', created_at})
  if #inbox > 0 then extend(fields, {'inbox_last', #inbox, 'pending', pending}) end
  if #observer > 0 then
    call('ZADD', key('observers', id), 1, cmsgpack.pack(observer))
    extend(fields, {'observer_last', '1'})
  end
  if alive(owner) then
    extend(fields, {'status', 'running', 'owner', owner, 'begun_at', created_at})
    rows.add(id, fields)
    return CREATED + 1
  end
  extend(fields, {'status', 'pending', 'wake_at', wake_at})
  rows.add(id, fields)
  tell(id)
  return CREATED
end

-- turns

local function restarted(row, restart, fields)
  local first = call('HMGET', RUN .. row.id, 'first_workflow', 'first_input', 'input', 'epoch')
  if not first[1] then fields.first_workflow = row.workflow end
  if not first[2] then fields.first_input = first[3] end
  fields.generation = tonumber(row.generation) + 1
  fields.epoch = tonumber(first[4] or '0') + 1
  for i = 1, #restart, 2 do fields[restart[i]] = restart[i + 1] end
end

-- The fields that a patch makes of a row. `sleeps`: it is left so that only some mail wakes it.
local function patched(row, patch, now, seen)
  local status, owner, wake_at, standing, held_kind, drift, recoveries, ended_at, prune_at, sleeps = unpack(patch)
  local mailed, ended = unseen(row, seen, sleeps), TERMINAL[status]
  if ended then
    owner, wake_at = '', ''
  elseif mailed then
    wake_at = now
  end
  if ended or (owner == '' and wake_at ~= '') then tell(row.id) end
  return {
    status = status, owner = owner, wake_at = wake_at, standing = standing, held_kind = held_kind, drift = drift,
    recoveries = recoveries, ended_at = ended_at, prune_at = prune_at, updated_at = now,
    mailed = mailed and owner ~= '' and '1' or '0', unsettled = ended and owes(row, row.orphans) or '0',
  }
end

-- Subscriptions of a run that ends or begins anew (`over`) go before anything is returned, and it makes none.
local function leave_and_return(row, extras, now, over)
  if over then mail.unsubscribe_all(row) end
  if not extras then return end
  for _, target in ipairs(extras[2]) do mail.unsubscribe(row, target) end
  mail.give_back(row, extras[3], now)
end

local function show(row, extras)
  shown.publish(row, extras[5])
  shown.append(row.id, extras[6])
  keep_letters(extras[7])
end

-- A turn that changes more than its history.
local function full_turn(row, seen, added, full)
  local now, last, consumed, patch, restart, extras, over = unpack(full)
  local id, drops, fields = row.id, extras and #extras[1] > 0, {}
  if restart then
    call('DEL', ENTRIES .. id)
  elseif drops then
    drop_rows(id, extras[1], true)
  end
  set_all(ENTRIES .. id, added)
  mail.consume(row, consumed, now)
  leave_and_return(row, extras, now, over)
  if patch then
    fields = patched(row, patch, now, seen)
  elseif row.mailed == '1' and not unseen(row, seen) then
    fields = {wake_at = '', mailed = '0'}
  end
  if restart then restarted(row, restart, fields) end
  if restart or drops then fields.fence, fields.skipped = last, rows.skipped(id, last) end
  rows.change(row, fields)
  if extras then
    show(row, extras)
    if not over then mail.subscribe(row, extras[4], now) end
  end
  if restart then shown.begin_anew(id) end
end

writes.turn = function(write)
  local _, id, _, _, _, _, seen, added, full = unpack(write)
  local row = rows.read(id)
  local answer = judged(row, write)
  if answer then return answer end
  full_turn(row, seen, added, full)
  local handled = handle_posts() -- what a subscription finds is mail that the turn has not seen
  return committed(handled and rows.glance(id) or row, seen)
end

writes.step = step

-- from outside

local mailed_row -- the run that the last message went to, as long as nothing but mail has come since

writes.deliver = function(write)
  local _, id, message_id, kind, value, now, limit = unpack(write)
  local row = mailed_row and mailed_row.id == id and mailed_row or rows.read(id)
  mailed_row = row
  if not row then return {'missing'} end
  local number = call('HGET', key('message-numbers', id), message_id)
  if number then return {'delivered', tonumber(number), 0, row.owner} end
  if TERMINAL[row.status] then return {'ended', row.status} end
  if limit >= 0 and COUNTED[kind] and tonumber(row.pending) >= limit then return {'full', tonumber(row.pending)} end
  return {'delivered', mail.add(row, message_id, kind, value, now), 1, row.owner}
end

-- `fields` say how the row of an ended run reads.
writes['end'] = function(write)
  local _, id, turn_id, now, unless_begun, marker, fields_flat = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > 0 and row_has_turn(id, position, turn_id) then return COMMITTED end
  if TERMINAL[row.status] then return {'ended', row.status} end
  if unless_begun and rows.begun(row) then return {'begun'} end
  call('HSET', ENTRIES .. id, position + 1, marker)
  mail.unsubscribe_all(row)
  local fields = {fence = position + 1, orphans = rows.begun(row) and '1' or '0'}
  for i = 1, #fields_flat, 2 do fields[fields_flat[i]] = fields_flat[i + 1] end
  fields.unsettled = owes(row, fields.orphans)
  rows.change(row, fields)
  tell(id)
  return COMMITTED
end

writes.release = function(write)
  local _, id, worker, now = unpack(write)
  local row = rows.read(id)
  if not row or TERMINAL[row.status] or not alive(worker) then return {'superseded'} end
  if row.owner ~= '' and row.owner ~= worker then return {'superseded'} end
  if row.owner ~= '' then rows.release(row, now, false) end
  return COMMITTED
end

writes.observe = function(write)
  local _, id, observer, target = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'standing')
  if not found[1] then return {'missing'} end
  if TERMINAL[found[1]] then return {'ended', found[1], found[2] or ''} end
  observe(id, {observer, target})
  return {'observing'}
end

writes.rewind = function(write)
  local _, id, base, turn_id, now, dropped, added, returned, fields_flat = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and row_has_turn(id, base + 1, turn_id) then return COMMITTED end
  if position ~= base then return {'superseded'} end
  local last = base + #added / 2
  drop_rows(id, dropped, false)
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
writes.tell = function(write)
  local _, id, told = unpack(write)
  local row = rows.glance_at_end(id)
  if not row then return {'missing'} end
  if row.unsettled ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(told) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  if owes(row, row.orphans) == '0' then rows.settle(row) end
  return COMMITTED
end

writes.settle = function(write)
  local _, id, now, told, consumed, returned, letters, orphans, moved = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  if row.unsettled ~= '1' or not TERMINAL[row.status] then return COMMITTED end
  for _, observer in ipairs(told) do call('ZREM', key('observers', id), cmsgpack.pack(observer)) end
  mail.consume(row, consumed, now)
  mail.give_back(row, returned, now)
  mail.move(row, moved, now)
  keep_letters(letters)
  local left = orphans and '0' or row.orphans
  rows.change(row, {orphans = left, unsettled = owes(row, left)})
  return COMMITTED
end

writes.publish = topics.publish
writes.fan_out = topics.fan_out

writes.append = function(write)
  local _, id, worker, items, first = unpack(write)
  local found = call('HMGET', RUN .. id, 'status', 'owner')
  if not found[1] then return {'missing'} end
  local refused = refusal(found[1], found[2], worker, true)
  if refused then return refused end
  shown.append(id, shown.fresh(id, items, first))
  return COMMITTED
end

writes.supersede = function(write)
  local _, id, location, writer = unpack(write)
  if call('EXISTS', RUN .. id) == 0 then return {'missing'} end
  shown.supersede(id, location, writer)
  return COMMITTED
end

-- A post from another slice.
writes.post = function(write)
  local message = cmsgpack.unpack(write[2])
  handlers[message[1]](message)
  return COMMITTED
end
