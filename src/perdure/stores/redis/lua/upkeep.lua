-- Forgetting what is over: ARGV is the call and its arguments (MessagePack), then as for a commit.

local calls = {}

local function forget_run(row)
  rows.forget(row)
  mail.forget(row.id)
  shown.forget(row.id)
  call('DEL', RUN .. row.id, ENTRIES .. row.id, key('observers', row.id))
end

calls.forget_runs = function(ids, now)
  local forgotten = 0
  for _, id in ipairs(ids) do
    local row = rows.read(id)
    if row and call('ZSCORE', key('prunable'), id) and tonumber(row.prune_at) <= tonumber(now) then
      forget_run(row)
      forgotten = forgotten + 1
    end
  end
  return forgotten
end

local function each_until(name, until_, limit, visit)
  for _, member in ipairs(call('ZRANGEBYSCORE', name, '-inf', until_, 'LIMIT', 0, limit)) do
    visit(cmsgpack.unpack(member))
    call('ZREM', name, member)
  end
end

calls.forget_expired = function(now, remembered_since, limit)
  each_until(key('expiring'), now, limit, function(at)
    local event = topics.read_event(at[1], at[2])
    if event then topics.leave(event, now) end
  end)
  each_until(key('values-until'), now, limit, function(at) call('HDEL', key('published', at[1]), at[2]) end)
  each_until(key('consumed'), remembered_since, limit, function(at)
    call('HDEL', key('message-numbers', at[1]), at[2])
  end)
  each_until(key('sent-since'), remembered_since, limit, function(at) call('HDEL', key('sent'), at[1]) end)
  each_until(key('event-tombs'), remembered_since, limit, function(at)
    local name = topics.event_key(at[1], at[2])
    call('HDEL', key('event-ids', at[1]), call('HGET', name, 'id') or '')
    call('DEL', name)
  end)
  if SLICE > 0 then call('ZREMRANGEBYSCORE', key('gone'), '-inf', call('TIME')[1] - 86400) end
  return 0
end

local given = cmsgpack.unpack(ARGV[1])
local answer = calls[given[1]](unpack(given, 2))
handle_posts()
return done(answer)
