-- Script `workers`: claims and releases of runs, worker leases and fencing, signing keys, and other small changes.
--
-- ARGV: the command and its arguments (MessagePack), then as for `commit`.
-- Keys: workers (hash: id -> record) and leases (hash: id -> lease_until), both in partition 0 only; alive (set) and
-- fenced (sorted set by time) in every partition; signing-keys:<name> (list), meta and upgrade (hashes); outbox; runs and
-- their indexes by `run_rows.lua`.
--
-- Partition 0 decides whether a worker is fenced. Every partition has its own copy of the live workers, so that it can
-- check a write without a call to another partition.

local commands = {}

local function fence(worker)
  call('ZADD', key('fenced'), call('TIME')[1], worker)
  call('SREM', key('alive'), worker)
end

-- Claim the earliest due runs. The script is atomic, so that no run is claimed twice. A fenced worker gets nothing: the
-- takeover that released its runs may have finished, and runs that it claimed now would have an owner that is never
-- replaced. The claim clears `wake_at`; a message that arrives later sets it again (`inbox.add`).
commands.claim = function(worker, now, due_by, wanted, pool, shards, limit, gates)
  if not is_alive(worker) then return {} end
  local claimed = {}
  for _, due in ipairs(due_queues.earliest(due_by, wanted, pool, shards, limit, gates)) do
    local row = run_rows.read(due[1])
    if not run_rows.is_claimable(row) then
      due_queues.remove(due[1], due[3])
    else
      run_rows.change(row, {
        owner = worker, status = 'running', wake_at = '', has_new_messages = '0', updated_at = now,
        first_executed_at = row.first_executed_at == '' and now or row.first_executed_at,
      })
      local position = run_rows.position(row)
      claimed[#claimed + 1] = {row.id, tonumber(row.last_message_no), position, string.format('%.17g', due[2])}
    end
  end
  return claimed
end

-- Make held runs of these workflows due; return how many were not due before.
commands.retry_held = function(wanted, kind, now)
  local woken = 0
  for _, pair in ipairs(wanted) do
    for _, id in ipairs(call('ZRANGE', key('held', kind, pair), 0, -1)) do
      local row = run_rows.read(id)
      if row and row.place ~= 'waiting' and (row.wake_at == '' or (tonumber(row.wake_at) or math.huge) > tonumber(now)) then
        run_rows.change(row, {wake_at = now})
        mark_changed(id)
        woken = woken + 1
      end
    end
  end
  return woken
end

-- Release a page of a worker's runs. `fenced`: partition 0 has fenced the worker. This partition fences it first, so
-- that the worker cannot write to a run that another worker claims next.
commands.release_runs = function(worker, now, recovered, limit, fenced)
  if fenced then fence(worker) end
  local released = call('ZRANGE', key('owned', worker), 0, limit - 1)
  for _, id in ipairs(released) do
    local row = run_rows.read(id)
    if row then run_rows.release(row, now, recovered) end
    call('ZREM', key('owned', worker), id) -- also if its row is missing or names another owner
  end
  return released
end

commands.join = function(worker, blob, lease_until)
  if call('HSETNX', key('workers'), worker, blob) == 0 then return 0 end
  call('HSET', key('leases'), worker, lease_until)
  call('SADD', key('alive'), worker)
  return 1
end

commands.renew = function(worker, blob, lease_until)
  if call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
  call('HSET', key('workers'), worker, blob)
  call('HSET', key('leases'), worker, lease_until)
  return 1
end

-- Make a worker known in a partition other than 0. `new`: the worker has just joined, so that a fence of an earlier
-- worker with the same id no longer applies.
commands.announce = function(worker, new)
  if new then call('ZREM', key('fenced'), worker) end
  if call('ZSCORE', key('fenced'), worker) then return 0 end
  call('SADD', key('alive'), worker)
  return 1
end

-- Decide in partition 0 whether the worker is fenced. A lease that was renewed after `unless_renewed_after` prevents
-- it.
commands.fence_worker = function(worker, unless_renewed_after)
  local lease_until = call('HGET', key('leases'), worker)
  if not lease_until then return 0 end
  if call('ZSCORE', key('fenced'), worker) then return 1 end
  if unless_renewed_after ~= '' and tonumber(lease_until) > tonumber(unless_renewed_after) then return 0 end
  fence(worker)
  return 1
end

-- Fence the worker in another partition, after partition 0 has decided.
commands.fence_in_partition = function(worker)
  fence(worker)
  return 1
end

-- Partitions other than 0 keep the fence, because a delayed `announce` may still arrive there. `maintenance.lua`
-- deletes it after a day.
commands.remove_worker = function(worker)
  call('SREM', key('alive'), worker)
  if PARTITION == 0 then
    call('HDEL', key('workers'), worker)
    call('HDEL', key('leases'), worker)
    call('ZREM', key('fenced'), worker)
  end
  return 1
end

commands.add_key = function(name, blob, only_if_none)
  local keys = key('signing-keys', name)
  if not only_if_none or call('EXISTS', keys) == 0 then call('RPUSH', keys, blob) end
  return call('LRANGE', keys, 0, -1)
end

function commands.remove_dead_letter(id) return dead_letters.remove(id) end

-- Delete partition messages that their targets have handled.
commands.delete_outgoing = function(numbers)
  return call('HDEL', key('outbox'), unpack(numbers))
end

-- Record the layout of a new store; return the recorded layout.
commands.initialize = function(format, shards, partitions)
  if call('EXISTS', key('meta')) == 0 then
    call('HSET', key('meta'), 'format', format, 'shards', shards, 'partitions', partitions)
  end
  return call('HMGET', key('meta'), 'format', 'shards', 'partitions')
end

-- Add those of these runs that are held to the index `held-runs`.
commands.index_held = function(ids)
  for _, id in ipairs(ids) do
    local row = run_rows.read(id)
    if row then run_rows.index_hold(row) end
  end
  return #ids
end

-- Add runs to the indexes of searches: {id, type of the error, end} each. `before` and `last_id` are the cursor of the
-- next page.
commands.index_runs = function(runs, before, last_id)
  for _, run in ipairs(runs) do
    local row = run_rows.read(run[1])
    if row and tonumber(row.created_at) then
      run_index.add_existing(row, row.ended_at == run[3] and run[2] or '')
    end
  end
  call('HSET', key('upgrade'), 'before', before, 'last_id', last_id)
  return #runs
end

-- Add the topics among the next keys of the server to the list of topics; return the cursor of the next call.
commands.index_topics = function(cursor)
  local prefix = key('topic')
  local pattern = string.gsub(prefix, '[%*%?%[%]\\]', '\\%0') .. '*'
  local found = call('SCAN', cursor, 'MATCH', pattern, 'COUNT', 1000)
  for _, name in ipairs(found[2]) do topics.index_name(string.sub(name, #prefix + 1)) end
  return found[1]
end

-- Record that all partitions have at least this format.
commands.raise_format = function(format)
  local stored = tonumber(call('HGET', key('meta'), 'format'))
  if stored < format then call('HSET', key('meta'), 'format', format) end
  return format
end

local command = cmsgpack.unpack(ARGV[1])
return reply(commands[command[1]](unpack(command, 2)))
