-- A turn of one entry in a run where nothing else is going on: ARGV is the run's id, the worker, the position that the
-- turn was computed from, the highest number of the inbox that it knows of, and the value of the entry. A turn that
-- ends its run, and has seen no mail, has more: the status, when the run may be pruned, the channel of hints, that of
-- who calls (`publish`) and his name, how the run stands, when it ended, when that was written, and other fields of the
-- row that change. 1 if it was done; 0: something is not as it almost always is, and nothing has happened. What it
-- leaves is what `course.step` and `course.turn` would leave (`course.lua`, which has the rules).

local id, worker, base, seen, value, ends = unpack(ARGV, 1, 6)
local row, entries = RUN .. id, ENTRIES .. id
local owner, mailed, last_message_no, skipped = unpack(call('HMGET', row, 'owner', 'mailed', 'last_message_no', 'skipped'))
if owner ~= worker then return 0 end -- who has ended has none
if mailed == '1' or tonumber(last_message_no or 0) > tonumber(seen) then return 0 end
if call('HLEN', entries) + tonumber(skipped or 0) ~= tonumber(base) then return 0 end
if call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
if not ends then
  call('HSET', entries, base + 1, value)
  return 1
end

-- An end is told to nobody here, and lets go of nothing; nor is there mail, of which none was seen. What a row has from
-- earlier turns is as it is in a new one.
local status, created_at, observer_last, attached, wake_at, held_kind, recoveries, drift = unpack(call(
  'HMGET', row, 'status', 'created_at', 'observer_last', 'attached', 'wake_at', 'held_kind', 'recoveries', 'drift'
))
if observer_last or attached == '1' then return 0 end
if (wake_at or '') ~= '' or (held_kind or '') ~= '' then return 0 end
if (recoveries or '0') ~= '0' or (drift or EMPTY) ~= EMPTY then return 0 end
if call('EXISTS', key('subscriptions', id)) == 1 then return 0 end
local prune_at, channel, mine, sender, standing, ended_at, updated_at = unpack(ARGV, 7, 13)
call('HSET', entries, base + 1, value)
call(
  'HSET', row, 'status', ends, 'owner', '', 'standing', standing, 'ended_at', ended_at, 'updated_at', updated_at,
  unpack(ARGV, 14)
)
call('ZREM', key('status', status), id)
call('ZADD', key('status', ends), created_at, id)
call('ZREM', key('owned', worker), id)
if prune_at ~= '' then call('ZADD', key('prunable'), prune_at, id) end
publish(channel, mine, sender, {id})
return 1
