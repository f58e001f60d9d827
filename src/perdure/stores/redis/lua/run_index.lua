-- Module `run_index`: the indexes by which runs are searched, and the tags of runs.
--
-- Keys, all sorted sets of run ids, by creation unless stated otherwise: workflow:<workflow>, internal (runs of
-- perdure's own workflows), run-queue:<queue>, error:<type of the error>, ended (by end), tag:<key, text>, tag-number:<key> (by the number of the tag). The tags of a
-- run are the field `tags` of its row: a map of key -> tag as in `index_tag` (tags.lua).

-- Return the tags of a run, none if they cannot be read.
function run_index.tags(id)
  local stored = call('HGET', RUN .. id, 'tags')
  local readable, tags = pcall(cmsgpack.unpack, stored or '\128')
  return readable and type(tags) == 'table' and tags or {}
end

function run_index.add_tags(id, created_at, tags)
  for name, tag in pairs(tags) do index_tag(id, created_at, name, tag) end
end

local function remove_tag(id, name, tag)
  local is_text = type(tag) == 'string'
  call('ZREM', key('tag', name, is_text and tag or tostring(tag[1])), id)
  if not is_text then call('ZREM', key('tag-number', name), id) end
end

local function is_tag(tag)
  return type(tag) == 'string' or (type(tag) == 'table' and tag[1])
end

-- Change tags: key -> tag, or false to remove it.
function run_index.change_tags(row, changes)
  local tags = run_index.tags(row.id)
  for name, tag in pairs(changes) do
    if is_tag(tags[name]) then remove_tag(row.id, name, tags[name]) end
    tags[name] = tag or nil
    if tag then index_tag(row.id, row.created_at, name, tag) end
  end
  if next(tags) then
    call('HSET', RUN .. row.id, 'tags', cmsgpack.pack(tags))
  else
    call('HDEL', RUN .. row.id, 'tags')
  end
end

-- Add a run of a store that was created before these indexes.
function run_index.add_existing(row, error_type)
  call('ZADD', key('workflow', row.workflow), row.created_at, row.id)
  if is_internal(row.workflow) then call('ZADD', key('internal'), row.created_at, row.id) end
  if TERMINAL[row.status] and row.ended_at ~= '' then call('ZADD', key('ended'), row.ended_at, row.id) end
  if TERMINAL[row.status] and error_type ~= '' then
    call('HSET', RUN .. row.id, 'error_type', error_type)
    call('ZADD', key('error', error_type), row.created_at, row.id)
  end
  for name, tag in pairs(run_index.tags(row.id)) do
    if is_tag(tag) then index_tag(row.id, row.created_at, name, tag) end
  end
end

-- Remove a deleted run, with a row that has ended.
function run_index.delete(row)
  call('ZREM', key('workflow', row.workflow), row.id)
  if is_internal(row.workflow) then call('ZREM', key('internal'), row.id) end
  call('ZREM', key('ended'), row.id)
  if (row.error_type or '') ~= '' then call('ZREM', key('error', row.error_type), row.id) end
  local queue = call('HGET', RUN .. row.id, 'queue')
  if queue and queue ~= '' then call('ZREM', key('run-queue', queue), row.id) end
  for name, tag in pairs(run_index.tags(row.id)) do
    if is_tag(tag) then remove_tag(row.id, name, tag) end
  end
end
