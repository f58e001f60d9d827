-- A batch: ARGV is the writes (MessagePack), this slice's number, the channel of hints, that of who calls
-- (`publish`) and his name. Answers the writes' answers (and what `done` adds).

local answers = {}
for i, write in ipairs(cmsgpack.unpack(ARGV[1])) do
  local name = write[1]
  answers[i] = (course[name] or writes[name])(write)
  if handle_posts() or name ~= 'deliver' then mailed_row = nil end
end
return done(answers)
