-- Unread events of a run by name: the limit of a mailbox counts per event name.

CREATE INDEX inbox_unread_events ON inbox (run_pk, name, number)
    WHERE consumed_at IS NULL AND kind IN ('event', 'assignment');
