-- Module `outbox`: partition messages, which carry changes between runs and topics of different partitions.
--
-- A message for this partition is handled before the call returns. A message for another partition stays in the outbox
-- until the caller, or a later sweep, has delivered it (`partitions.py`). Delivery is at least once; every handler
-- detects a message that it has handled before.
-- Keys: outbox (hash: number -> "partition:sent_at:message"), outbox-last (counter).

function outbox.add(partition, message)
  if partition == PARTITION then
    local_messages[#local_messages + 1] = message
    return
  end
  local number = call('INCR', key('outbox-last'))
  local sent_at = message[1] == 'assign' and message[10] or '' -- orders the delivery of assignments
  local packed = partition .. ':' .. sent_at .. ':' .. cmsgpack.pack(message)
  call('HSET', key('outbox'), number, packed)
  outgoing[#outgoing + 1] = {tostring(number), packed}
end

-- `assign` is for a run and `send` for the run or topic that it names; all others are for a topic.
function outbox.handle(message)
  local verb = message[1]
  local handlers = verb == 'assign' and inbox or verb == 'send' and dead_letters or topics
  handlers[verb](message)
end

function outbox.handle_all()
  local at = 1
  while at <= #local_messages do -- handlers may add messages
    outbox.handle(local_messages[at])
    at = at + 1
  end
  local_messages = {}
end
