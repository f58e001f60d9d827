-- A turn of one entry in a run where nothing else is going on: ARGV is the run's id, the worker, the position that the
-- turn was computed from, the highest number of the inbox that it knows of, and the value of the entry. A turn that
-- ends its run, and has seen no mail, has more: the status, when the run may be pruned, the channel of hints, the hint,
-- and the fields of the row that change. 1 if it was done; 0: something is not as it almost always is, and nothing has
-- happened. What it leaves is what `course.step` and `course.turn` would leave (`course.lua`, which has the rules).

local id, worker, base, seen, value, ends = unpack(ARGV, 1, 6)
local row = call('HMGET', RUN .. id, 'owner', 'mailed', 'inbox_last', 'skipped') -- who has ended has no owner
if row[1] ~= worker or row[2] == '1' or tonumber(row[3] or 0) > tonumber(seen) then return 0 end
if call('HLEN', ENTRIES .. id) + tonumber(row[4] or 0) ~= tonumber(base) then return 0 end
if call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
if not ends then
  call('HSET', ENTRIES .. id, base + 1, value)
  return 1
end

-- An end is told to nobody here, and lets go of nothing; nor is there mail, of which none was seen. What a row has from
-- earlier turns is as it is in a new one.
local status, created_at, observer_last, attached, wake_at, held_kind, recoveries, drift = unpack(call(
  'HMGET', RUN .. id, 'status', 'created_at', 'observer_last', 'attached', 'wake_at', 'held_kind', 'recoveries', 'drift'
))
if observer_last or attached == '1' then return 0 end
if (wake_at or '') ~= '' or (held_kind or '') ~= '' then return 0 end
if (recoveries or '0') ~= '0' or (drift or EMPTY) ~= EMPTY then return 0 end
if call('EXISTS', key('subscriptions', id)) == 1 then return 0 end
local prune_at, channel, hint = ARGV[7], ARGV[8], ARGV[9]
call('HSET', ENTRIES .. id, base + 1, value)
call('HSET', RUN .. id, 'status', ends, unpack(ARGV, 10))
call('ZREM', key('status', status), id)
call('ZADD', key('status', ends), created_at, id)
call('ZREM', key('owned', worker), id)
if prune_at ~= '' then call('ZADD', key('prunable'), prune_at, id) end
call('PUBLISH', channel, hint)
return 1
