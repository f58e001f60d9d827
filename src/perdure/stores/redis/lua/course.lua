-- The writes of a batch that every run needs: how it begins, adds to its history and goes on. As for all writes, each
-- one decides before it changes anything, and cannot fail after that.

local function extend(flat, ...)
  local size = #flat
  for i = 1, select('#', ...) do flat[size + i] = (select(i, ...)) end
end

-- Made before, by the same call.
local function created_again(id, owner, observer)
  if #observer > 0 then
    local found = call('HMGET', RUN .. id, 'status', 'standing')
    if TERMINAL[found[1]] then return {'ended', found[1], found[2] or ''} end
    rows.observe(id, observer)
  end
  return CREATED + (owner ~= '' and call('HGET', RUN .. id, 'owner') == owner and 1 or 0)
end

function course.create(write)
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
    if mail.COUNTED[kind] then pending = pending + 1 end
    if kind == 'assignment' then
      call('HSET', key('serials', id), message_id, '0:' .. slice)
      posts.add(slice, {'saw', topic, place, id})
    end
  end
  extend(fields, 'id', id, 'created_by', created_by, 'created_at', created_at)
  if #inbox > 0 then extend(fields, 'last_message_no', #inbox, 'pending', pending) end
  if #observer > 0 then
    call('ZADD', key('observers', id), 1, cmsgpack.pack(observer))
    extend(fields, 'observer_last', '1')
  end
  if alive(owner) then
    extend(fields, 'status', 'running', 'owner', owner, 'first_executed_at', created_at)
    rows.add(id, fields)
    return CREATED + 1
  end
  extend(fields, 'status', 'pending', 'wake_at', wake_at)
  rows.add(id, fields)
  tell(id)
  return CREATED
end

local function restarted(row, restart, fields)
  local first = call('HMGET', RUN .. row.id, 'original_workflow', 'original_input', 'input', 'epoch')
  if not first[1] then fields.original_workflow = row.workflow end
  if not first[2] then fields.original_input = first[3] end
  fields.generation = tonumber(row.generation) + 1
  fields.epoch = tonumber(first[4] or '0') + 1
  for i = 1, #restart, 2 do fields[restart[i]] = restart[i + 1] end
end

-- The fields that a patch makes of a row. `sleeps`: it is left so that only some mail wakes it.
local function patched(row, patch, now, seen)
  local status, owner, wake_at, standing, held_kind, drift, recoveries, ended_at, prune_at, sleeps = unpack(patch)
  local mailed, ended = history.unseen(row, seen, sleeps), TERMINAL[status]
  if ended then
    owner, wake_at = '', ''
  elseif mailed then
    wake_at = now
  end
  if ended or (owner == '' and wake_at ~= '') then tell(row.id) end
  return {
    status = status, owner = owner, wake_at = wake_at, standing = standing, held_kind = held_kind, drift = drift,
    recoveries = recoveries, ended_at = ended_at, prune_at = prune_at, updated_at = now,
    mailed = mailed and owner ~= '' and '1' or '0', unsettled = ended and rows.owes(row, row.orphans) or '0',
  }
end

-- Subscriptions of a run that ends or begins anew (`over`) go before anything is returned, and it makes none.
local function leave_and_return(row, extras, now, over)
  if over and call('EXISTS', key('subscriptions', row.id)) == 1 then mail.unsubscribe_all(row) end
  if not extras then return end
  for _, target in ipairs(extras[2]) do mail.unsubscribe(row, target) end
  mail.give_back(row, extras[3], now)
end

local function show(row, extras)
  shown.publish(row, extras[5])
  shown.append(row.id, extras[6])
  letters.keep(extras[7])
end

-- A turn that changes more than its history.
local function full_turn(row, seen, added, full)
  local now, last, consumed, patch, restart, extras, over = unpack(full)
  local id, drops, fields = row.id, extras and #extras[1] > 0, {}
  if restart then
    call('DEL', ENTRIES .. id)
  elseif drops then
    history.drop(id, extras[1], true)
  end
  set_all(ENTRIES .. id, added)
  if #consumed > 0 then mail.consume(row, consumed, now) end
  leave_and_return(row, extras, now, over)
  if patch then
    fields = patched(row, patch, now, seen)
  elseif row.mailed == '1' and not history.unseen(row, seen) then
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

function course.turn(write)
  local _, id, _, _, _, _, seen, added, full = unpack(write)
  local row = rows.read(id)
  local answer = history.judged(row, write)
  if answer then return answer end
  full_turn(row, seen, added, full)
  local handled = handle_posts() -- what a subscription finds is mail that the turn has not seen
  return history.committed(handled and rows.glance(id) or row, seen)
end

-- A turn that does no more than add rows: position, value, position, value ...
function course.step(write)
  local id, seen, added = write[2], write[7], write[8]
  local row = rows.glance(id)
  local answer = history.judged(row, write)
  if answer then return answer end
  set_all(ENTRIES .. id, added)
  if row.mailed == '1' and not history.unseen(row, seen) then
    rows.change(rows.read(id), {wake_at = '', mailed = '0'})
  end
  return history.committed(row, seen)
end
