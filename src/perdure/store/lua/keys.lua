-- What every script begins with: the names of keys.
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
