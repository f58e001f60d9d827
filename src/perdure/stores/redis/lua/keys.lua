-- What every script begins with: the names of keys, and how hints are told.
--
-- A script touches the keys of one slice only, all of which begin with its hash tag (KEYS[1]). Numbers that are moments
-- travel as text, because Lua would round them when it writes them out. Empty text stands for None.

local TAG = KEYS[1]
local call = redis.call
local NUL = '\0'
local EMPTY = '\144' -- MessagePack's array of nothing

local function key(kind, name, second, third)
  local made = TAG .. ':' .. kind .. ':' .. (name or '')
  if second then made = made .. NUL .. second end
  return third and made .. NUL .. third or made
end

-- Those that are wanted most, ready made but for the id.
local RUN, ENTRIES = TAG .. ':run:', TAG .. ':entries:'

-- Tell who listens to the channel of hints, if there is anybody but who calls: `mine` is a channel that only he listens
-- to. Where others may listen to another node, it is empty. Who calls would hear himself just when he has the answer
-- and something to do: 10 us of a run of one step. A user who may not ask who listens tells it to everybody.
local function publish(channel, mine, sender, ids)
  local listen = mine ~= '' and redis.pcall('PUBSUB', 'NUMSUB', channel, mine)
  if listen and listen[2] == 1 and listen[4] == 1 then return end
  call('PUBLISH', channel, cmsgpack.pack({sender, #ids <= 200 and ids}))
end
