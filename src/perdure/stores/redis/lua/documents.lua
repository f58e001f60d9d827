-- Module `documents`: small versioned records, in the partition of their kind.
--
-- Keys: document:<kind, id> (hash: version, body, write_id, due_at, expires_at), documents:<kind> (sorted set of ids in
-- the order of their bytes), due-documents:<kind> (sorted set of ids by due_at), expiring-documents (sorted set of {kind,
-- id} by expires_at), last-document-version (counter).

local function set_time(name, member, at)
  if at == '' then
    call('ZREM', name, member)
  else
    call('ZADD', name, at, member)
  end
end

function documents.delete(kind, id)
  call('DEL', key('document', kind, id))
  call('ZREM', key('documents', kind), id)
  call('ZREM', key('due-documents', kind), id)
  call('ZREM', key('expiring-documents'), cmsgpack.pack({kind, id}))
end

-- Write a document if `base` is its version. A document is due earlier if its time is before that of all others.
function documents.put(write)
  local _, kind, id, base, body, write_id, due_at, expires_at = unpack(write)
  local name = key('document', kind, id)
  local version, last_write_id = unpack(call('HMGET', name, 'version', 'write_id'))
  if not body and not version then return {'versioned', 0} end
  if version and last_write_id == write_id then return {'versioned', tonumber(version)} end
  if tonumber(version or '0') ~= base then return {'superseded'} end
  if not body then
    documents.delete(kind, id)
    return {'versioned', 0}
  end
  local first = call('ZRANGE', key('due-documents', kind), 0, 0, 'WITHSCORES')
  if due_at ~= '' and (not first[2] or tonumber(due_at) < tonumber(first[2])) then mark_changed('document:' .. kind) end
  version = call('INCR', key('last-document-version'))
  call('HSET', name, 'version', version, 'body', body, 'write_id', write_id, 'due_at', due_at, 'expires_at', expires_at)
  call('ZADD', key('documents', kind), 0, id)
  set_time(key('due-documents', kind), id, due_at)
  set_time(key('expiring-documents'), cmsgpack.pack({kind, id}), expires_at)
  return {'versioned', version}
end
