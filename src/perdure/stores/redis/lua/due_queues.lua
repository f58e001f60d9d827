-- Module `due_queues`: finds the runs that are due first.
--
-- Keys: due:<pool, workflow, version, shard> (sorted set of runs by wake_at; one per queue; of runs with a gate the gate is
-- the last part of the name), heads:<pool> (sorted set of queues by the wake_at of their first run).

local NAME = '^([^%z]*%z[^%z]*)%z(%d+)%z?(.*)$' -- workflow and version, shard, gate

-- Return the gate of the runs of a queue, '' if they have none.
function due_queues.gate_of(queue)
  local _, _, gate = string.match(queue, NAME)
  return gate
end

-- Bring the heads up to date. It runs once at the end of a script, for all queues that the script has changed.
function due_queues.refresh_heads()
  for name, parts in pairs(stale_queues) do
    local pool, queue = parts[1], parts[2]
    local first = call('ZRANGE', name, 0, 0, 'WITHSCORES')
    if first[1] then
      call('ZADD', key('heads', pool), first[2], queue)
    else
      call('ZREM', key('heads', pool), queue)
    end
  end
end

-- Compare by bytes, as sorted sets do. Lua's own `<` depends on the locale of the server.
function due_queues.is_less(a, b)
  for i = 1, math.min(#a, #b) do
    local x, y = string.byte(a, i), string.byte(b, i)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local function is_earlier(a, b)
  if a.at ~= b.at then return a.at < b.at end
  return due_queues.is_less(a.id, b.id)
end

-- Return the next due run of a queue, or nil. Runs are read in pages.
local function next_run(queue)
  if queue.read > #queue.page then
    if queue.exhausted then return nil end
    local limit = queue.size
    queue.page = call('ZRANGEBYSCORE', queue.name, '-inf', queue.now, 'WITHSCORES', 'LIMIT', queue.offset, limit)
    queue.read, queue.offset, queue.exhausted = 1, queue.offset + limit, #queue.page < 2 * limit
    if #queue.page == 0 then return nil end
  end
  local id, at = queue.page[queue.read], tonumber(queue.page[queue.read + 1])
  queue.read = queue.read + 2
  return {id = id, at = at, queue = queue}
end

-- Restore the heap order below this index.
local function sift_down(heap, index)
  local item = heap[index]
  while true do
    local child = 2 * index
    if child < #heap and is_earlier(heap[child + 1], heap[child]) then child = child + 1 end
    if child > #heap or not is_earlier(heap[child], item) then break end
    heap[index], index = heap[child], child
  end
  heap[index] = item
end

-- Return the queues of these workflows (`workflow NUL version`) and shards (false: all) with due runs, as {name, gate}. Runs
-- with a gate are found by the name of their gate alone, in all shards.
local function find_queues(now, wanted, pool, shards, gates)
  local workflows, is_wanted_shard, found = {}, {}, {}
  for _, pair in ipairs(wanted) do workflows[pair] = true end
  for _, shard in ipairs(shards or {}) do is_wanted_shard[tostring(shard)] = true end
  for _, queue in ipairs(call('ZRANGEBYSCORE', key('heads', pool), '-inf', now)) do
    local pair, shard, gate = string.match(queue, NAME)
    local is_wanted = gate == '' and (not shards or is_wanted_shard[shard]) or (gates[gate] or 0) > 0
    if workflows[pair] and is_wanted then found[#found + 1] = {queue, gate} end
  end
  return found
end

-- Remove a run from its queue whose row is missing or damaged: at the head it would block all claims.
function due_queues.remove(id, queue)
  call('ZREM', queue.name, id)
  stale_queues[queue.name] = {queue.pool, queue.queue}
end

-- Return the earliest due runs of these workflows and shards: {id, wake_at, queue} each. Each queue is sorted, so the queues
-- are merged. Reading and sorting everything that is due took 2.3 of the 3.7 s that 10,000 wake-ups took a server.
-- `gates`: {gate, number} each, how many runs of each gate are returned at most.
function due_queues.earliest(now, wanted, pool, shards, limit, gates)
  local free = {}
  for _, gate in ipairs(gates) do free[gate[1]] = gate[2] end
  local names, heap, found = find_queues(now, wanted, pool, shards, free), {}, {}
  local size = math.ceil(limit / math.max(1, #names)) + 8
  for _, each in ipairs(names) do
    local queue, gate = each[1], each[2]
    heap[#heap + 1] = next_run({
      name = key('due', pool, queue), pool = pool, queue = queue, gate = gate, now = now, size = size, offset = 0,
      page = {}, read = 1,
    })
  end
  for index = math.floor(#heap / 2), 1, -1 do sift_down(heap, index) end
  while heap[1] and #found < limit do
    local first = heap[1]
    local gate = first.queue.gate
    local is_open = gate == '' or free[gate] > 0
    if is_open then found[#found + 1] = {first.id, first.at, first.queue} end
    if gate ~= '' and is_open then free[gate] = free[gate] - 1 end
    heap[1] = is_open and next_run(first.queue) or table.remove(heap)
    if heap[1] == first then heap[1] = nil else sift_down(heap, 1) end
  end
  return found
end
