-- Script `commit`: apply the writes of a batch that belong to one partition, in order, as one atomic call.
--
-- ARGV: the writes (MessagePack), the number of this partition, the channel of change hints, the store's own channel
-- and its name (`publish` in keys.lua). Returns the result of each write, and what `reply` adds.

local results = {}
for i, write in ipairs(cmsgpack.unpack(ARGV[1])) do
  local name = write[1]
  results[i] = (run_writes[name] or other_writes[name])(write)
  if handle_messages() or name ~= 'deliver' then delivered_row = nil end
end
return reply(results)
