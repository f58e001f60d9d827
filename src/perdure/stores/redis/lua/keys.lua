-- Prelude of every script: builds key names and publishes change hints. It touches no key itself.
--
-- A script touches the keys of one partition only. All of them begin with the hash tag of the partition (KEYS[1]).
-- Timestamps travel as text, because Lua would round them when it prints them. Empty text stands for None.

local TAG = KEYS[1]
local call = redis.call
local NUL = '\0'
local EMPTY = '\144' -- the empty array of MessagePack

local function key(kind, name, second, third)
  local built = TAG .. ':' .. kind .. ':' .. (name or '')
  if second then built = built .. NUL .. second end
  return third and built .. NUL .. third or built
end

-- Prefixes of the two keys that scripts build most often; only the run id is appended.
local RUN, ENTRIES = TAG .. ':run:', TAG .. ':entries:'

-- Publish the ids of changed runs as a change hint, unless the calling store is the only listener. Only that store
-- listens to `own_channel`; on a cluster it is empty, because other stores may listen on another node. A hint to itself
-- would reach the store together with the result and cost 10 us of a run of one step. If the user may not run PUBSUB,
-- the hint is always published. A hint without ids (more than 200) says that any run may have changed.
local function publish(channel, own_channel, sender, ids)
  local listeners = own_channel ~= '' and redis.pcall('PUBSUB', 'NUMSUB', channel, own_channel)
  if listeners and listeners[2] == 1 and listeners[4] == 1 then return end
  call('PUBLISH', channel, cmsgpack.pack({sender, #ids <= 200 and ids}))
end
