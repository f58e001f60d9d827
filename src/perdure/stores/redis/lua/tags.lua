-- Prelude of the scripts that create runs: what they share to index them.

local function is_internal(workflow) return string.byte(workflow, 1) == 126 end -- perdure's own: the name begins with ~

-- Add a run to the index of one tag. A stored tag is text, or {canonical text, number or '', value for Python}. Indexes:
-- tag:<key, text> (runs by creation) and tag-number:<key> (runs by the number of their tag).
local function index_tag(id, created_at, name, tag)
  local is_text = type(tag) == 'string'
  call('ZADD', key('tag', name, is_text and tag or tag[1]), created_at, id)
  if not is_text and tag[2] ~= '' then call('ZADD', key('tag-number', name), tag[2], id) end
end
