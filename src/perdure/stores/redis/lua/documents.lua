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

-- Write a document if `base` is its version; without a body delete it. Its dead letters are stored with it.
function documents.put(write)
  local _, kind, id, base, body, write_id, due_at, expires_at, undelivered = unpack(write)
  local name = key('document', kind, id)
  local version, last_write_id, was_due_at = unpack(call('HMGET', name, 'version', 'write_id', 'due_at'))
  if not body and not version then return {'versioned', 0} end
  if body and version and last_write_id == write_id then return {'versioned', tonumber(version)} end
  if tonumber(version or '0') ~= base then return {'superseded'} end
  dead_letters.add(undelivered)
  if not body then
    documents.delete(kind, id)
    return {'versioned', 0}
  end
  local due_before = was_due_at and was_due_at ~= '' and tonumber(was_due_at)
  if due_at ~= '' and (not due_before or tonumber(due_at) < due_before) then mark_changed('document:' .. kind) end
  version = call('INCR', key('last-document-version'))
  call('HSET', name, 'version', version, 'body', body, 'write_id', write_id, 'due_at', due_at, 'expires_at', expires_at)
  call('ZADD', key('documents', kind), 0, id)
  set_time(key('due-documents', kind), id, due_at)
  set_time(key('expiring-documents'), cmsgpack.pack({kind, id}), expires_at)
  return {'versioned', version}
end
