-- Runs that are due: a sorted set for each queue, and one of all queues.

-- Each pool has a sorted set of its queues by when the first run in them is due; brought up to date at a script's end.
function queues.refresh_heads()
  for name, place in pairs(stale_queues) do
    local pool, queue = place[1], place[2]
    local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')
    if first[1] then
      call('ZADD', key('heads', pool), first[2], queue)
    else
      call('ZREM', key('heads', pool), queue)
    end
  end
end

-- The order of bytes, which is that of sorted sets; Lua's own would depend on the server's language.
function queues.less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

-- The earliest due runs of these workflows (`workflow NUL version`) and shards (false: all): {id, wake_at} each.
function queues.due(now, wanted, pool, shards, limit)
  local workflows, of_shard, found = {}, {}, {}
  for _, pair in ipairs(wanted) do workflows[pair] = true end
  for _, shard in ipairs(shards or {}) do of_shard[tostring(shard)] = true end
  for _, queue in ipairs(call('ZRANGEBYSCORE', key('heads', pool), '-inf', now)) do
    local pair, shard = string.match(queue, '^(.*)%z(%d+)$')
    if workflows[pair] and (not shards or of_shard[shard]) then
      local due = call('ZRANGEBYSCORE', key('due', pool, queue), '-inf', now, 'WITHSCORES', 'LIMIT', 0, limit)
      for i = 1, #due, 2 do found[#found + 1] = {due[i], tonumber(due[i + 1])} end
    end
  end
  table.sort(found, function(a, b)
    if a[2] ~= b[2] then return a[2] < b[2] end
    return queues.less(a[1], b[1])
  end)
  for i = #found, limit + 1, -1 do found[i] = nil end
  return found
end
