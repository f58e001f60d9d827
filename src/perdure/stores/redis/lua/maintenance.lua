-- Script `maintenance`: deletes what is no longer needed: pruned runs, expired events and values, remembered ids.
--
-- ARGV: the command and its arguments (MessagePack), then as for `commit`.
-- Keys: every key of a deleted run; expiring-events, expiring-values, expiring-documents, queues, consumed, sent, sent-since, deleted-events,
-- fenced.

local commands = {}

-- Delete these runs, except those that are not prunable any more (rewound meanwhile); return the ids of the deleted ones.
commands.delete_runs = function(ids, now)
  local deleted = {}
  for _, id in ipairs(ids) do
    local row = run_rows.read(id)
    if row and call('ZSCORE', key('prunable'), id) and tonumber(row.prune_at) <= tonumber(now) then
      run_rows.delete(row)
      deleted[#deleted + 1] = id
    end
  end
  return deleted
end

-- Delete one run, unless it is open or needs finalization (rewound meanwhile); return 1 if it was deleted.
commands.delete_run = function(id)
  local row = run_rows.read(id)
  if not row or not TERMINAL[row.status] or row.unfinalized == '1' then return 0 end
  run_rows.delete(row)
  return 1
end

local function delete_until(name, time, limit, delete)
  for _, member in ipairs(call('ZRANGEBYSCORE', name, '-inf', time, 'LIMIT', 0, limit)) do
    delete(cmsgpack.unpack(member))
    call('ZREM', name, member)
  end
end

commands.delete_expired = function(now, remembered_since, limit)
  delete_until(key('expiring-events'), now, limit, function(at)
    local event = topics.read_event(at[1], at[2])
    if event then topics.delete_event(event, now) end
  end)
  delete_until(key('expiring-values'), now, limit, function(at) call('HDEL', key('published', at[1]), at[2]) end)
  delete_until(key('consumed'), remembered_since, limit, function(at)
    call('HDEL', key('message-numbers', at[1]), at[2])
  end)
  delete_until(key('sent-since'), remembered_since, limit, function(at) call('HDEL', key('sent'), at[1]) end)
  delete_until(key('expiring-documents'), now, limit, function(at) documents.delete(at[1], at[2]) end)
  delete_until(key('deleted-events'), remembered_since, limit, function(at)
    local name = topics.event_key(at[1], at[2])
    call('HDEL', key('event-ids', at[1]), call('HGET', name, 'id') or '')
    call('DEL', name)
  end)
  for _, queue in ipairs(call('ZRANGE', key('queues'), 0, -1)) do places.prune_partitions(queue, now, limit) end
  if PARTITION > 0 then call('ZREMRANGEBYSCORE', key('fenced'), '-inf', call('TIME')[1] - 86400) end
  return 0
end

local command = cmsgpack.unpack(ARGV[1])
local result = commands[command[1]](unpack(command, 2))
handle_messages()
return reply(result)
