-- Prelude of every script that has modules: result codes, lazy modules, framed values, change hints, live workers, and
-- the state that modules share during one call.
--
-- Keys: alive (set of the ids of workers that are not fenced; every partition has a copy).

local PARTITION = tonumber(ARGV[2] or '0')
local TERMINAL = {succeeded = true, failed = true, cancelled = true}

-- The most frequent results are numbers. All others are arrays: the kind of result, then its fields.
local COMMITTED = 0 -- plus 1 if the inbox has messages that the turn has not seen
local CREATED = 2 -- plus 1 if the worker owns the new run

-- A module is a table whose functions are built when the first of them is used. Every call executes the whole text of a
-- script: building the functions of all modules took 53 of the 98 us that a server spent on a new run.
local LAZY = {__index = function(self, name)
  setmetatable(self, nil)
  self.build(self)
  return self[name]
end}

local function module(build)
  return setmetatable({build = build}, LAZY)
end

-- A framed value is a header that Lua reads (MessagePack), followed by bytes that only Python reads.
local function read_header(value)
  local length = struct.unpack('>I4', value)
  return cmsgpack.unpack(string.sub(value, 5, 4 + length))
end

-- HSET of any number of pairs, in chunks, because `unpack` is limited by the size of Lua's stack.
local function set_all(name, flat_pairs)
  for first = 1, #flat_pairs, 1000 do
    call('HSET', name, unpack(flat_pairs, first, math.min(first + 999, #flat_pairs)))
  end
end

-- Change hints: runs that other workers and clients may want to read again.

local changed = {}

local function mark_changed(id)
  changed[id] = true
end

local function publish_changes(channel, own_channel, sender)
  local ids = {}
  if not next(changed) then return ids end
  for id in pairs(changed) do ids[#ids + 1] = id end
  publish(channel, own_channel, sender, ids)
  return ids
end

-- Whether the worker has joined and is not fenced. Every partition knows this, so that it can check writes alone.

local known_alive = {}

local function is_alive(worker)
  if worker == '' then return false end
  if known_alive[worker] == nil then
    known_alive[worker] = call('SISMEMBER', key('alive'), worker) == 1
  end
  return known_alive[worker]
end

-- Partition messages (`outbox.lua`): those for this partition, not handled yet, and those for other partitions.
local local_messages, outgoing = {}, {}

-- Handle the messages for this partition; return whether there were any.
local function handle_messages()
  if #local_messages == 0 then return false end
  outbox.handle_all()
  return true
end

-- Due queues whose first run may have changed: key -> {pool, queue}.
local stale_queues = {}

-- Topics that may have got or lost queued events or subscriptions.
local stale_topics = {}

-- Partitions of queues whose counts or settings may have changed: name -> {queue, partition}.
local stale_partitions = {}

-- The row that the last `deliver` of a batch changed. It is valid until another kind of write follows.
local delivered_row

-- Build the reply of a script that may have changed something: result, messages to other partitions, changed runs.
local function reply(result)
  if next(stale_queues) then due_queues.refresh_heads() end
  if next(stale_partitions) then places.refresh_partitions() end
  if next(stale_topics) then topics.refresh_names() end
  return {result, outgoing, publish_changes(ARGV[3], ARGV[4], ARGV[5])}
end
