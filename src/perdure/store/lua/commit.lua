-- A batch: ARGV is the writes (MessagePack), this slice's number, the channel of hints and the name of who calls.
-- Answers the writes' answers, the posts for other slices, and the runs that changed.

local answers = {}
for i, write in ipairs(cmsgpack.unpack(ARGV[1])) do
  answers[i] = writes[write[1]](write)
  if handle_posts() or write[1] ~= 'deliver' then mailed_row = nil end
end
rows.refresh_heads()
return {answers, outgoing, publish_hints(ARGV[3], ARGV[4])}
