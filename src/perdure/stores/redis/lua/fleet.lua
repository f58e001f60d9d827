-- Claims, wake-ups and workers: ARGV is the call and its arguments (MessagePack), then as for a commit.

local calls = {}

local function fence_worker(worker)
  call('ZADD', key('gone'), call('TIME')[1], worker)
  call('SREM', key('alive'), worker)
end

calls.claim = function(worker, now, due_by, wanted, pool, shards, limit)
  if not alive(worker) then return {} end
  local claimed = {}
  for i, due in ipairs(queues.due(due_by, wanted, pool, shards, limit)) do
    local row = rows.read(due[1])
    rows.change(row, {
      owner = worker, status = 'running', wake_at = '', mailed = '0', updated_at = now,
      first_executed_at = row.first_executed_at == '' and now or row.first_executed_at,
    })
    claimed[i] = {row.id, tonumber(row.last_message_no), rows.position(row), string.format('%.17g', due[2])}
  end
  return claimed
end

calls.wake_held = function(wanted, kind, now)
  local woken = 0
  for _, pair in ipairs(wanted) do
    for _, id in ipairs(call('ZRANGE', key('held', kind, pair), 0, -1)) do
      local row = rows.read(id)
      if row.wake_at == '' or tonumber(row.wake_at) > tonumber(now) then
        rows.change(row, {wake_at = now})
        tell(id)
        woken = woken + 1
      end
    end
  end
  return woken
end

-- A page of a worker's runs; it must have been fenced off in this slice before another may have them.
calls.release = function(worker, now, recovered, limit, gone)
  if gone then fence_worker(worker) end
  local released = call('ZRANGE', key('owned', worker), 0, limit - 1)
  for _, id in ipairs(released) do rows.release(rows.read(id), now, recovered) end
  return released
end

-- The first slice keeps the workers; every slice keeps who is alive, so that it can judge alone.

calls.join = function(worker, blob, lease_until)
  if call('HSETNX', key('workers'), worker, blob) == 0 then return 0 end
  call('HSET', key('leases'), worker, lease_until)
  call('SADD', key('alive'), worker)
  return 1
end

calls.renew = function(worker, blob, lease_until)
  if call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
  call('HSET', key('workers'), worker, blob)
  call('HSET', key('leases'), worker, lease_until)
  return 1
end

-- That it was gone here counts no more if the first slice had never heard of it, or had forgotten it.
calls.announce = function(worker, new)
  if new then call('ZREM', key('gone'), worker) end
  if call('ZSCORE', key('gone'), worker) then return 0 end
  call('SADD', key('alive'), worker)
  return 1
end

calls.declare_gone = function(worker, unless_renewed_after)
  local lease_until = call('HGET', key('leases'), worker)
  if not lease_until then return 0 end
  if call('ZSCORE', key('gone'), worker) then return 1 end
  if unless_renewed_after ~= '' and tonumber(lease_until) > tonumber(unless_renewed_after) then return 0 end
  fence_worker(worker)
  return 1
end

calls.fence = function(worker)
  fence_worker(worker)
  return 1
end

-- Slices other than the first go on knowing that it is gone, for an announcement may still be on its way there.
calls.retire = function(worker)
  call('SREM', key('alive'), worker)
  if SLICE == 0 then
    call('HDEL', key('workers'), worker)
    call('HDEL', key('leases'), worker)
    call('ZREM', key('gone'), worker)
  end
  return 1
end

calls.add_key = function(name, blob, only_if_none)
  local keys = key('keys', name)
  if not only_if_none or call('EXISTS', keys) == 0 then call('RPUSH', keys, blob) end
  return call('LRANGE', keys, 0, -1)
end

function calls.remove_letter(id) return letters.remove(id) end

calls.settle_posts = function(numbers)
  return call('HDEL', key('outbox'), unpack(numbers))
end

-- What a new store is given to know itself by; what an old one was given.
calls.found = function(format, shards, slices)
  if call('EXISTS', key('meta')) == 0 then
    call('HSET', key('meta'), 'format', format, 'shards', shards, 'slices', slices)
  end
  return call('HMGET', key('meta'), 'format', 'shards', 'slices')
end

local given = cmsgpack.unpack(ARGV[1])
return done(calls[given[1]](unpack(given, 2)))
