-- A new run that its worker owns, and of which nobody else knows: ARGV is its id, the worker, when it was made and by
-- which call, and the other fields of its row. 1 if it was made; 0: something is not as it almost always is, and
-- nothing has happened. What it leaves is what `course.create` would leave (`course.lua`, which has the rules).

local id, worker, created_at, created_by = unpack(ARGV, 1, 4)
local row = RUN .. id
if call('EXISTS', row) == 1 or call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
call(
  'HSET', row, 'id', id, 'created_by', created_by, 'created_at', created_at,
  'status', 'running', 'owner', worker, 'first_executed_at', created_at, unpack(ARGV, 5)
)
call('ZADD', key('status', 'running'), created_at, id)
call('ZADD', key('owned', worker), '0', id)
return 1
