-- Script `fast_create`: create a new run that its worker owns and that no other run refers to.
--
-- ARGV: run id, worker, creation time, id of the creating call, workflow, tags ('' if there are none), then the other
-- fields of the row. Returns 1 if the run was created. Returns 0 without any change if this is not the common case; the general path (`run_writes.create`) then
-- gets the same write. This script adds no rule of its own: it leaves the same keys as the general path (ADR 14).
-- Keys: run:<id>, status:running, owned:<worker>, alive; the indexes of `run_index.lua`.

local id, worker, created_at, created_by, workflow, tags = unpack(ARGV, 1, 6)
local row = RUN .. id
if call('EXISTS', row) == 1 or call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
call(
  'HSET', row, 'id', id, 'created_by', created_by, 'created_at', created_at, 'workflow', workflow,
  'status', 'running', 'owner', worker, 'first_executed_at', created_at, unpack(ARGV, 7)
)
call('ZADD', key('status', 'running'), created_at, id)
call('ZADD', key('owned', worker), '0', id)
call('ZADD', key('workflow', workflow), created_at, id)
if is_internal(workflow) then call('ZADD', key('internal'), created_at, id) end
if tags ~= '' then
  call('HSET', row, 'tags', tags)
  for name, tag in pairs(cmsgpack.unpack(tags)) do index_tag(id, created_at, name, tag) end
end
return 1
