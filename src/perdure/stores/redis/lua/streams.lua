-- Module `streams`: the outputs of runs: streams and published values.
--
-- Keys: stream:<run, stream> (list of items), written:<run, location> (list of {stream, offset, writer}: which items
-- the location wrote, so that they can be marked without reading the whole stream), superseded:<run, stream> (set of
-- offsets), streams:<run>, writing-locations:<run> (sets of names), written-by:<run> (hash: writer -> number of items),
-- published:<run> (hash: name -> value), expiring-values (sorted set of values by expiry).

function streams.publish_values(row, values)
  for _, given in ipairs(values) do
    local name, value, expires_at = given[1], given[2], given[3]
    local member = cmsgpack.pack({row.id, name})
    call('HSET', key('published', row.id), name, value)
    if expires_at == '' then
      call('ZREM', key('expiring-values'), member)
    else
      call('ZADD', key('expiring-values'), expires_at, member)
    end
  end
end

-- Append items: {stream, location, writer, blob} each.
function streams.append(id, items)
  for _, item in ipairs(items) do
    local stream, location, writer, blob = unpack(item)
    local offset = call('RPUSH', key('stream', id, stream), blob) - 1
    call('RPUSH', key('written', id, location), cmsgpack.pack({stream, offset, writer}))
    call('SADD', key('streams', id), stream)
    call('SADD', key('writing-locations', id), location)
    call('HINCRBY', key('written-by', id), writer, 1)
  end
end

-- Return the items that the writer has not appended yet: a repeated call appends nothing twice. `first` is the number
-- of items that the writer appended before these; -1 if it is not known.
function streams.skip_appended(id, items, first)
  if first < 0 or #items == 0 then return items end
  local appended = tonumber(call('HGET', key('written-by', id), items[1][3]) or '0') - first
  local rest = {}
  for i = math.max(appended, 0) + 1, #items do rest[#rest + 1] = items[i] end
  return rest
end

-- Mark the items of a location as superseded, except those of `writer` if it is given.
function streams.supersede(id, location, writer)
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

-- A new generation uses its locations again: items of earlier generations stay as they are and cannot be superseded.
function streams.start_generation(id)
  for _, location in ipairs(call('SMEMBERS', key('writing-locations', id))) do
    call('DEL', key('written', id, location))
  end
  call('DEL', key('writing-locations', id))
end

function streams.delete(id)
  for _, stream in ipairs(call('SMEMBERS', key('streams', id))) do
    call('DEL', key('stream', id, stream), key('superseded', id, stream))
  end
  streams.start_generation(id)
  for _, name in ipairs(call('HKEYS', key('published', id))) do
    call('ZREM', key('expiring-values'), cmsgpack.pack({id, name}))
  end
  call('DEL', key('published', id), key('streams', id), key('written-by', id))
end
