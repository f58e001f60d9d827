-- A new run that its worker owns, and of which nobody else knows: ARGV is its id, the worker, when it was made, and the
-- fields of its row. 1 if it was made; 0: something is not as it almost always is, and nothing has happened.
-- What it leaves is what `course.create` would leave (`course.lua`, which has the rules).

local id, worker, created_at = ARGV[1], ARGV[2], ARGV[3]
if call('EXISTS', RUN .. id) == 1 or call('SISMEMBER', key('alive'), worker) == 0 then return 0 end
call('HSET', RUN .. id, unpack(ARGV, 4))
call('ZADD', key('status', 'running'), created_at, id)
call('ZADD', key('owned', worker), '0', id)
return 1
