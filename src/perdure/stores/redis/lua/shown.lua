-- What runs show: published values and streams.
--
-- A stream is a list of framed items ({location, writer} before the rest). `written` of a location says which items it
-- wrote, so that they can be marked (`superseded`) without a look at all the others.

function shown.publish(row, values)
  for _, given in ipairs(values) do
    local name, value, expires = given[1], given[2], given[3]
    local member = cmsgpack.pack({row.id, name})
    call('HSET', key('published', row.id), name, value)
    if expires == '' then
      call('ZREM', key('values-until'), member)
    else
      call('ZADD', key('values-until'), expires, member)
    end
  end
end

-- Items: {stream, location, writer, blob} each.
function shown.append(id, items)
  for _, item in ipairs(items) do
    local stream, location, writer, blob = unpack(item)
    local offset = call('RPUSH', key('stream', id, stream), blob) - 1
    call('RPUSH', key('written', id, location), cmsgpack.pack({stream, offset, writer}))
    call('SADD', key('streams', id), stream)
    call('SADD', key('writing-locations', id), location)
    call('HINCRBY', key('written-by', id), writer, 1)
  end
end

-- What the writer has not yet appended of these items, of which `first` came before.
function shown.fresh(id, items, first)
  if first < 0 or #items == 0 then return items end
  local done = tonumber(call('HGET', key('written-by', id), items[1][3]) or '0') - first
  local rest = {}
  for i = math.max(done, 0) + 1, #items do rest[#rest + 1] = items[i] end
  return rest
end

-- Mark what other writers than this one (any, if there is none) have written at a location.
function shown.supersede(id, location, writer)
  local name, kept = key('written', id, location), {}
  for _, packed in ipairs(call('LRANGE', name, 0, -1)) do
    local written = cmsgpack.unpack(packed)
    if writer and written[3] == writer then
      kept[#kept + 1] = packed
    else
      call('SADD', key('superseded', id, written[1]), written[2])
    end
  end
  call('DEL', name)
  for _, packed in ipairs(kept) do call('RPUSH', name, packed) end
end

-- A run that begins anew: what was written so far stays as it is, and its locations are free.
function shown.begin_anew(id)
  for _, location in ipairs(call('SMEMBERS', key('writing-locations', id))) do
    call('DEL', key('written', id, location))
  end
  call('DEL', key('writing-locations', id))
end

function shown.forget(id)
  for _, stream in ipairs(call('SMEMBERS', key('streams', id))) do
    call('DEL', key('stream', id, stream), key('superseded', id, stream))
  end
  shown.begin_anew(id)
  for _, name in ipairs(call('HKEYS', key('published', id))) do
    call('ZREM', key('values-until'), cmsgpack.pack({id, name}))
  end
  call('DEL', key('published', id), key('streams', id), key('written-by', id))
end
