-- The writes of a batch, one function each. Every one decides before it changes anything, and none can fail after that.

local writes = {}

-- Answers that say yes or no only are numbers. The rest are arrays: a word, and what belongs to it.
local COMMITTED = 0 -- and one more if there is mail that the turn has not seen
local CREATED = 2 -- and one more if it is owned

local function committed(row, seen)
  return COMMITTED + (mail.unseen(row, seen) and 1 or 0)
end

local function row_has_turn(id, position, turn_id)
  local found = call('HGET', key('entries', id), position)
  return found and header_of(found)[1] == turn_id
end

local function add_rows(id, first, values)
  if #values == 1 then
    call('HSET', key('entries', id), first, values[1])
    return
  end
  local flat = {}
  for i, value in ipairs(values) do
    flat[2 * i - 1] = first + i - 1
    flat[2 * i] = value
  end
  set_all(key('entries', id), flat)
end

-- Delete the rows of these locations (`below`: and of all beneath them) and every marker.
local function drop_rows(id, locations, below)
  local name, wanted = key('entries', id), {}
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

-- Whether a run that ends still owes something: news, unread events, or to its orphans.
local function owes(row, orphans)
  if orphans == '1' or tonumber(row.pending) > 0 then return '1' end
  return row.observer_last ~= '0' and call('EXISTS', key('observers', row.id)) == 1 and '1' or '0'
end

local function refusal(row_status, owner, write_owner, owned)
  if TERMINAL[row_status] then return {'ended', row_status} end
  if not alive(write_owner) then return {'superseded'} end
  if owner ~= write_owner and (owned or owner ~= '') then return {'superseded'} end
end

-- making

local function extend(flat, more)
  for _, part in ipairs(more) do flat[#flat + 1] = part end
end

writes.create = function(write)
  local _, id, created_by, owner, created_at, wake_at, fields, entries, inbox = unpack(write)
  local by = call('HGET', key('run', id), 'created_by')
  if by and by ~= created_by then return {'exists', call('HGETALL', key('run', id))} end
  if by then return CREATED + (owner ~= '' and call('HGET', key('run', id), 'owner') == owner and 1 or 0) end
  if #entries > 0 then add_rows(id, 1, entries) end
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
  if #inbox > 0 then extend(fields, {'inbox_last', #inbox, 'pending', pending}) end
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
  local first = call('HMGET', key('run', row.id), 'first_workflow', 'first_input', 'input')
  if not first[1] then fields.first_workflow = row.workflow end
  if not first[2] then fields.first_input = first[3] end
  fields.generation = tonumber(row.generation) + 1
  fields.epoch = tonumber(row.epoch) + 1
  for i = 1, #restart, 2 do fields[restart[i]] = restart[i + 1] end
end

local function patched(row, patch, now, seen, fields)
  for i = 1, #patch, 2 do fields[patch[i]] = patch[i + 1] end
  local ended = TERMINAL[fields.status]
  if ended then fields.owner = '' end
  local anew = fields.begun_at == '' -- it begins again, in its time
  local unseen = mail.unseen(row, seen, (anew or fields.held_kind ~= '') and fields.owner == '')
  if ended then fields.wake_at = '' elseif unseen then fields.wake_at = now end
  fields.mailed = unseen and fields.owner ~= '' and '1' or '0'
  fields.updated_at = now
  if ended then fields.unsettled = owes(row, row.orphans) end
  if ended or (fields.owner == '' and fields.wake_at ~= '') then tell(row.id) end
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

-- A turn that changes more than its history; `full` says what, or there was mail that woke the run.
local function full_turn(row, base, seen, values, full)
  local id, fields = row.id, {}
  local now, last, consumed, patch, restart, extras, over = unpack(full)
  local drops = extras and #extras[1] > 0
  if restart then
    call('DEL', key('entries', id))
    restarted(row, restart, fields)
  elseif drops then
    drop_rows(id, extras[1], true)
  end
  add_rows(id, base + 1, values)
  if restart or drops then fields.fence, fields.skipped = last, rows.skipped(id, last) end
  if consumed then mail.consume(row, consumed, now) end
  leave_and_return(row, extras, now, over)
  if patch then
    patched(row, patch, now, seen, fields)
  elseif row.mailed == '1' and not mail.unseen(row, seen) then
    fields.wake_at, fields.mailed = '', '0'
  end
  rows.change(row, fields)
  if extras then
    show(row, extras)
    if not over then mail.subscribe(row, extras[4], now) end
  end
  if restart then shown.begin_anew(id) end
end

-- `full` is missing if the turn does no more than add rows to the history.
writes.turn = function(write)
  local _, id, base, turn_id, worker, owned, seen, values, full = unpack(write)
  local row = rows.read(id, not full and FIELDS_OF_A_STEP)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and row_has_turn(id, base + 1, turn_id) then return committed(row, seen) end
  local refused = refusal(row.status, row.owner, worker, owned)
  if refused then return refused end
  if position ~= base then return {'superseded'} end
  if full or row.mailed == '1' then
    full_turn(full and row or rows.read(id), base, seen, values, full or {})
    local handled = handle_posts() -- what a subscription finds is mail that the turn has not seen
    return committed(handled and rows.read(id, FIELDS_OF_A_STEP) or row, seen)
  end
  add_rows(id, base + 1, values)
  return committed(row, seen)
end

-- from outside

writes.deliver = function(write)
  local _, id, message_id, kind, value, now, limit = unpack(write)
  local row = rows.read(id)
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
  add_rows(id, position + 1, {marker})
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
  local name = key('run', id)
  local found = call('HMGET', name, 'status', 'standing')
  if not found[1] then return {'missing'} end
  if TERMINAL[found[1]] then return {'ended', found[1], found[2] or ''} end
  local number = call('HINCRBY', name, 'observer_last', 1)
  call('ZADD', key('observers', id), 'NX', number, cmsgpack.pack({observer, target}))
  return {'observing'}
end

writes.rewind = function(write)
  local _, id, base, turn_id, now, dropped, values, returned, fields_flat = unpack(write)
  local row = rows.read(id)
  if not row then return {'missing'} end
  local position = rows.position(row)
  if position > base and row_has_turn(id, base + 1, turn_id) then return COMMITTED end
  if position ~= base then return {'superseded'} end
  local last = base + #values
  drop_rows(id, dropped, false)
  add_rows(id, base + 1, values)
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
  local found = call('HMGET', key('run', id), 'status', 'owner')
  if not found[1] then return {'missing'} end
  local refused = refusal(found[1], found[2], worker, true)
  if refused then return refused end
  shown.append(id, shown.fresh(id, items, first))
  return COMMITTED
end

writes.supersede = function(write)
  local _, id, location, writer = unpack(write)
  if call('EXISTS', key('run', id)) == 0 then return {'missing'} end
  shown.supersede(id, location, writer)
  return COMMITTED
end

-- A post from another slice.
writes.post = function(write)
  local message = cmsgpack.unpack(write[2])
  handlers[message[1]](message)
  return COMMITTED
end
