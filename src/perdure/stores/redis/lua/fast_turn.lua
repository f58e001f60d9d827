-- Script `fast_turn`: commit a turn of one entry that may end its run.
--
-- ARGV: run id, worker, base position, highest message number that the turn has seen, value of the entry. A turn that
-- ends its run, and has seen no message, adds: status, prune time, channel of change hints, the store's own channel and
-- its name (`publish` in keys.lua), turn state, end time, time of the write, type of the error ('' if there is none), then
-- other fields of the row that change.
-- Returns 1 if the turn was applied. Returns 0 without any change if this is not the common case; the general path
-- (`run_writes.step`, `run_writes.turn`) then gets the same write and decides its result. This script adds no rule of
-- its own: it leaves the same keys as the general path (ADR 14).
-- Keys: run:<id>, entries:<id>, alive, subscriptions:<id>; at the end of a run also status:<status>, owned:<worker> and
-- prunable, and the indexes of `run_index.lua`.
--
-- The numbers below are those of the acceptance rule of a turn (`stores/protocol.py`). Rule 2, a repeated call, needs
-- no check of its own: its turn has moved the position, so that rule 6 declines.

local id, worker, base, seen, value, ends = unpack(ARGV, 1, 6)
local row, entries = RUN .. id, ENTRIES .. id
local owner, has_new_messages, last_message_no, skipped =
  unpack(call('HMGET', row, 'owner', 'has_new_messages', 'last_message_no', 'skipped'))
if owner ~= worker then return 0 end -- rules 1, 3 and 5: a missing run and an ended run have no owner
if has_new_messages == '1' or tonumber(last_message_no or 0) > tonumber(seen) then return 0 end
if call('HLEN', entries) + tonumber(skipped or 0) ~= tonumber(base) then return 0 end -- rules 2 and 6
if call('SISMEMBER', key('alive'), worker) == 0 then return 0 end -- rule 4
if not ends then
  call('HSET', entries, base + 1, value) -- rule 7
  return 1
end

-- An end on the fast path needs no finalization: no observers, no parent, no messages, no subscriptions. All fields
-- that earlier turns may have changed have the values of a new run, so that they need not be reset.
-- A run with a place in a queue leaves it in the general path.
local status, created_at, last_observer_no, attached, wake_at, held_kind, recoveries, drift, place = unpack(call(
  'HMGET', row,
  'status', 'created_at', 'last_observer_no', 'attached', 'wake_at', 'held_kind', 'recoveries', 'drift', 'place'
))
if last_observer_no or attached == '1' or (place or '') ~= '' then return 0 end
if (wake_at or '') ~= '' or (held_kind or '') ~= '' then return 0 end
if (recoveries or '0') ~= '0' or (drift or EMPTY) ~= EMPTY then return 0 end
if call('EXISTS', key('subscriptions', id)) == 1 then return 0 end
local prune_at, channel, own_channel, sender, turn_state, ended_at, updated_at, error_type = unpack(ARGV, 7, 14)
call('HSET', entries, base + 1, value) -- rule 7
call(
  'HSET', row, 'status', ends, 'owner', '', 'turn_state', turn_state, 'ended_at', ended_at, 'updated_at', updated_at,
  unpack(ARGV, 15)
)
call('ZREM', key('status', status), id)
call('ZADD', key('status', ends), created_at, id)
call('ZREM', key('owned', worker), id)
call('ZADD', key('ended'), ended_at, id)
if error_type ~= '' then
  call('HSET', row, 'error_type', error_type)
  call('ZADD', key('error', error_type), created_at, id)
end
if prune_at ~= '' then call('ZADD', key('prunable'), prune_at, id) end
publish(channel, own_channel, sender, {id})
return 1
