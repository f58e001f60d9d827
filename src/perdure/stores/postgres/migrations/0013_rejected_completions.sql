-- Remove unread assignments from an inbox and offer their events to the next subscriptions. Returns the runs that got
-- one. An unread completion of a deferred, which its run rejects, is removed with its id: the next one is accepted.
CREATE OR REPLACE FUNCTION release_assignments(of_run bigint, numbers jsonb, now float8) RETURNS text[]
LANGUAGE plpgsql AS $$
DECLARE
    released bigint;
    message record;
    e topic_events;
    got text;
    woken text[] := '{}';
BEGIN
    FOR released IN SELECT n::bigint FROM jsonb_array_elements_text(numbers) AS n LOOP
        DELETE FROM inbox i
        WHERE i.run_pk = of_run AND i.number = released AND i.kind IN ('assignment', 'deferred')
              AND i.consumed_at IS NULL
        RETURNING i.kind, i.name, i.topic_offset INTO message;
        CONTINUE WHEN NOT FOUND OR message.kind = 'deferred';
        SELECT x.* INTO e FROM topic_events x JOIN topics t ON t.pk = x.topic_pk
        WHERE t.name = message.name AND x.event_offset = message.topic_offset AND x.deleted_at IS NULL;
        -- An assignment that the event does not refer to is a copy, in the inbox of a fork.
        CONTINUE WHEN NOT FOUND OR (e.consume AND e.assigned_to IS DISTINCT FROM of_run);
        IF expired(e.expires_at, now) THEN
            PERFORM delete_event(e, now);
            CONTINUE;
        END IF;
        got := offer(e, message.name, now, CASE WHEN NOT e.consume THEN of_run END);
        woken := woken || got;
        CONTINUE WHEN got IS NOT NULL;
        IF NOT e.consume THEN
            PERFORM delete_event_if_unreferenced(e, message.name, now);
        ELSIF e.delivery = 'after_wait' THEN
            PERFORM delete_event(e, now);
        ELSE
            UPDATE topic_events x SET assigned_to = NULL, queued = true
            WHERE x.topic_pk = e.topic_pk AND x.event_offset = e.event_offset;
        END IF;
    END LOOP;
    RETURN array_remove(woken, NULL);
END;
$$;
