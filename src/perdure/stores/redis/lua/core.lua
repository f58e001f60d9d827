-- What every script begins with that has rooms: framed values, hints, who is alive, posts, and how rooms are opened.

local SLICE = tonumber(ARGV[2] or '0')
local TERMINAL = {succeeded = true, failed = true, cancelled = true}

-- Answers that say yes or no only are numbers. The rest are arrays: a word, and what belongs to it.
local COMMITTED = 0 -- and one more if there is mail that the turn has not seen
local CREATED = 2 -- and one more if it is owned

-- A room is a table of functions that are made when the first of them is wanted: every call of a script runs all of its
-- text, and to make the functions of all rooms took a server 53 of the 98 us that it had for a new run.
local CLOSED = {__index = function(self, name)
  setmetatable(self, nil)
  self.open(self)
  return self[name]
end}

local function room(open)
  return setmetatable({open = open}, CLOSED)
end

-- A framed value: what Lua reads (MessagePack), then what only Python reads. This is the first part.
local function header_of(value)
  local length = struct.unpack('>I4', value)
  return cmsgpack.unpack(string.sub(value, 5, 4 + length))
end

local function set_all(name, pairs_flat)
  for first = 1, #pairs_flat, 1000 do
    call('HSET', name, unpack(pairs_flat, first, math.min(first + 999, #pairs_flat)))
  end
end

-- Hints: the runs that others will want to know of.

local changed = {}

local function tell(id)
  changed[id] = true
end

local function publish_hints(channel, mine, sender)
  local ids = {}
  if not next(changed) then return ids end
  for id in pairs(changed) do ids[#ids + 1] = id end
  publish(channel, mine, sender, ids)
  return ids
end

-- Workers, as far as every slice must know them.

local known_alive = {}

local function alive(worker)
  if worker == '' then return false end
  if known_alive[worker] == nil then
    known_alive[worker] = call('SISMEMBER', key('alive'), worker) == 1
  end
  return known_alive[worker]
end

local posted, outgoing = {}, {} -- posts that are still to be handled, and those for other slices (`posts.lua`)

-- Whether there were any.
local function handle_posts()
  if #posted == 0 then return false end
  posts.handle_all()
  return true
end

-- Queues of due runs that a change of a row has touched: key -> what it is made of: {pool, queue}.
local stale_queues = {}

local mailed_row -- the run that the last message of a batch went to, as long as nothing but mail has come since

-- What a script that may have changed something answers: what was asked, the posts for other slices, who changed.
local function done(answer)
  if next(stale_queues) then queues.refresh_heads() end
  return {answer, outgoing, publish_hints(ARGV[3], ARGV[4], ARGV[5])}
end
