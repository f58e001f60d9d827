-- Topics: assign events to subscriptions, when an event is published and when a run subscribes.
--
-- Publishes and subscribes on a topic are serialized by the lock on the topic's row. So an event sees every earlier
-- subscription, and a subscription sees every queued event that it is eligible for. Neither can miss the other.
--
-- Locks are taken in the order topics, runs. An assignment is a message in the inbox of another run, whose row must be
-- locked. The runs with the oldest subscriptions are therefore locked beforehand, in order of their ids. If
-- subscriptions have changed in between, another run is locked only if no waiting is needed (NOWAIT). Otherwise the
-- whole batch is aborted without storing anything (lock_not_available), and the client repeats it. A subscription
-- changes only under the lock of its run, and is checked again under that lock before an event is assigned to it.
--
-- Functions use `OFFSET 0` to look up each row separately. A plan made while there were few runs may otherwise scan
-- all of them for each write.

-- The topics of the assignments that writes of this batch release.
CREATE FUNCTION topics_of_releases(writes jsonb) RETURNS SETOF text LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT i.name
    FROM (
        SELECT w->>'run_id' AS run_id, n::bigint AS number
        FROM jsonb_array_elements(writes) AS w
        CROSS JOIN LATERAL jsonb_array_elements_text(coalesce(w->'returned', w->'extras'->'returned')) AS n
        WHERE w->>'kind' IN ('turn', 'finalize')
        OFFSET 0
    ) AS g
    CROSS JOIN LATERAL (SELECT x.pk FROM runs x WHERE x.id = g.run_id OFFSET 0) AS r
    CROSS JOIN LATERAL (
        SELECT x.name FROM inbox x WHERE x.run_pk = r.pk AND x.number = g.number AND x.kind = 'assignment' OFFSET 0
    ) AS i;
END;

-- Lock topics in order of their names, including those of released assignments. Creates missing topics.
CREATE FUNCTION lock_topics(names text[], writes jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    names := names || ARRAY(SELECT DISTINCT g.topic FROM topics_of_releases(writes) AS g (topic));
    INSERT INTO topics (name)
    SELECT DISTINCT n.name FROM unnest(names) AS n (name)
    WHERE NOT EXISTS (SELECT FROM topics t WHERE t.name = n.name COLLATE "C")
    ORDER BY 1
    ON CONFLICT DO NOTHING;
    PERFORM FROM topics t WHERE t.name = ANY (names) ORDER BY t.name FOR UPDATE;
END;
$$;

-- The runs to which writes of this batch will probably assign events: those with the oldest subscriptions.
CREATE FUNCTION oldest_subscriptions(writes jsonb) RETURNS text[] LANGUAGE sql STABLE
BEGIN ATOMIC
    WITH targets (topic, page) AS MATERIALIZED (
        SELECT coalesce(w->'event'->>'topic', w->>'topic') AS topic,
               CASE WHEN (w->'event'->>'consume')::boolean THEN 4 ELSE (w->>'page')::bigint END AS page
        FROM jsonb_array_elements(writes) AS w WHERE w->>'kind' IN ('publish', 'fan_out')
        UNION ALL
        SELECT g.topic, 4 FROM topics_of_releases(writes) AS g (topic)
        UNION ALL
        SELECT redirected->'to'->'event'->>'topic', 4
        FROM jsonb_array_elements(writes) AS w CROSS JOIN jsonb_array_elements(w->'redirected') AS redirected
        WHERE w->>'kind' = 'finalize'
        UNION ALL
        SELECT w->'send'->'event'->>'topic', 4
        FROM jsonb_array_elements(writes) AS w WHERE w->>'kind' = 'replay'
    )
    SELECT array_agg(DISTINCT r.id)
    FROM targets
    CROSS JOIN LATERAL (SELECT x.pk FROM topics x WHERE x.name = targets.topic OFFSET 0) AS t
    CROSS JOIN LATERAL (
        SELECT s.run_pk FROM subscriptions s
        WHERE s.topic_pk = t.pk
              AND s.pk > coalesce((SELECT e.fan_out_cursor FROM topic_events e
                                   WHERE e.topic_pk = t.pk AND e.fan_out_cursor IS NOT NULL
                                   ORDER BY e.event_offset LIMIT 1), 0)
        ORDER BY s.pk LIMIT targets.page
    ) AS s
    CROSS JOIN LATERAL (SELECT x.id FROM runs x WHERE x.pk = s.run_pk OFFSET 0) AS r;
END;

CREATE FUNCTION assignment_id(topic text, event_offset bigint) RETURNS text LANGUAGE sql IMMUTABLE
RETURN 'topic/' || topic || '/' || event_offset;

-- Whether a run has, or had, this event in its inbox.
CREATE FUNCTION has_seen(of_run bigint, topic text, at_offset bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN EXISTS (SELECT FROM inbox i WHERE i.run_pk = of_run AND i.id = assignment_id(topic, at_offset));
END;
$$;

-- Insert an event into a run's inbox, which deletes the subscription in all its topics. Returns the run's id, or NULL
-- if the given subscription no longer exists (a subscription that is being created is not given).
CREATE FUNCTION assign(e topic_events, topic text, to_run bigint, at_target text, now float8,
    subscription bigint DEFAULT NULL)
RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    r runs;
BEGIN
    SELECT * INTO r FROM runs WHERE pk = to_run FOR NO KEY UPDATE NOWAIT;
    IF subscription IS NOT NULL AND NOT EXISTS (SELECT FROM subscriptions s WHERE s.pk = subscription) THEN
        RETURN NULL;
    END IF;
    INSERT INTO inbox (run_pk, number, id, kind, name, body, sender, sent_at, expires_at, policy, target, topic_offset,
                       wants_reply, event_id)
    VALUES (r.pk, r.last_message_no + 1, assignment_id(topic, e.event_offset), 'assignment', topic, e.body,
            e.sender, e.sent_at, e.expires_at, 'discard', at_target, e.event_offset, false, e.event_id);
    PERFORM on_message(r, r.last_message_no + 1, 'assignment', now);
    DELETE FROM subscriptions s WHERE s.run_pk = r.pk AND s.target = at_target;
    IF e.consume THEN
        UPDATE topic_events x SET assigned_to = r.pk, queued = false, fan_out_cursor = NULL
        WHERE x.topic_pk = e.topic_pk AND x.event_offset = e.event_offset;
    END IF;
    RETURN r.id;
END;
$$;

-- Delete an event. Its row stays until `prune_page`, so that its id is not accepted again.
CREATE FUNCTION delete_event(e topic_events, now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    UPDATE topic_events x SET assigned_to = NULL, queued = false, fan_out_cursor = NULL, body = NULL, deleted_at = now
    WHERE x.topic_pk = e.topic_pk AND x.event_offset = e.event_offset;
END;
$$;

-- Delete an event that is not queued for later subscriptions, if no inbox contains it any more. Its row is locked, so
-- that of two concurrent readers the second sees that it is the last.
CREATE FUNCTION delete_event_if_unreferenced(e topic_events, topic text, now float8) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF e.delivery <> 'after_wait' THEN
        RETURN;
    END IF;
    SELECT * INTO e FROM topic_events x WHERE x.topic_pk = e.topic_pk AND x.event_offset = e.event_offset FOR UPDATE;
    IF e.fan_out_cursor IS NULL AND NOT EXISTS (
        SELECT FROM inbox i WHERE i.kind = 'assignment' AND i.consumed_at IS NULL AND i.name = topic
            AND i.topic_offset = e.event_offset)
    THEN
        PERFORM delete_event(e, now);
    END IF;
END;
$$;

-- The oldest subscription that is eligible for an event and whose run has not had it. With `of_run`, only
-- subscriptions of the run that released the event.
CREATE FUNCTION oldest_subscription(e topic_events, topic text, of_run bigint DEFAULT NULL) RETURNS subscriptions
LANGUAGE plpgsql STABLE AS $$
DECLARE
    s subscriptions;
BEGIN
    FOR s IN
        SELECT x.* FROM subscriptions x
        WHERE x.topic_pk = e.topic_pk AND (e.delivery <> 'after_wait' OR x.pk <= e.last_subscription)
              AND (of_run IS NULL OR x.run_pk = of_run)
        ORDER BY x.pk
    LOOP
        IF (e.delivery <> 'after_create' OR e.sent_at >= (SELECT r.created_at FROM runs r WHERE r.pk = s.run_pk))
           AND NOT has_seen(s.run_pk, topic, e.event_offset)
        THEN
            RETURN s;
        END IF;
    END LOOP;
    RETURN NULL;
END;
$$;

-- Assign the event to the oldest eligible subscription. Returns the run's id, or NULL if there is none.
CREATE FUNCTION offer(e topic_events, topic text, now float8, of_run bigint DEFAULT NULL) RETURNS text
LANGUAGE plpgsql AS $$
DECLARE
    s subscriptions;
    got text;
BEGIN
    LOOP
        s := oldest_subscription(e, topic, of_run);
        IF s.pk IS NULL THEN
            RETURN NULL;
        END IF;
        got := assign(e, topic, s.run_pk, s.target, now, s.pk);
        IF got IS NOT NULL THEN
            RETURN got;
        END IF;
    END LOOP;
END;
$$;

-- Assign the event to the eligible subscriptions of the next page.
CREATE FUNCTION offer_page(
    e topic_events, topic text, page bigint, now float8, OUT woken text[], OUT more boolean) LANGUAGE plpgsql AS $$
DECLARE
    s subscriptions;
    after bigint := coalesce(e.fan_out_cursor, 0);
    got text;
BEGIN
    woken := '{}';
    more := false;
    IF expired(e.expires_at, now) THEN
        PERFORM delete_event(e, now);
        RETURN;
    END IF;
    FOR s IN
        SELECT x.* FROM subscriptions x
        WHERE x.topic_pk = e.topic_pk AND x.pk > after AND x.pk <= e.last_subscription ORDER BY x.pk LIMIT page
    LOOP
        after := s.pk;
        IF has_seen(s.run_pk, topic, e.event_offset)
           OR (e.delivery = 'after_create' AND e.sent_at < (SELECT r.created_at FROM runs r WHERE r.pk = s.run_pk))
        THEN
            CONTINUE;
        END IF;
        got := assign(e, topic, s.run_pk, s.target, now, s.pk);
        IF got IS NOT NULL THEN
            woken := woken || got;
            IF e.consume THEN
                RETURN;
            END IF;
        END IF;
    END LOOP;
    more := EXISTS (
        SELECT FROM subscriptions x WHERE x.topic_pk = e.topic_pk AND x.pk > after AND x.pk <= e.last_subscription);
    UPDATE topic_events x SET fan_out_cursor = CASE WHEN more THEN after END
    WHERE x.topic_pk = e.topic_pk AND x.event_offset = e.event_offset;
    IF more THEN
        RETURN;
    END IF;
    IF e.consume AND e.delivery <> 'after_wait' THEN  -- offer it to newer subscriptions too
        got := offer(e, topic, now);
        woken := CASE WHEN got IS NULL THEN woken ELSE ARRAY[got] END;
        RETURN;
    END IF;
    PERFORM delete_event_if_unreferenced(e, topic, now);
END;
$$;

CREATE FUNCTION first_unfinished(topic_pk bigint) RETURNS topic_events LANGUAGE plpgsql STABLE AS $$
DECLARE
    e topic_events;
BEGIN
    SELECT * INTO e FROM topic_events x
    WHERE x.topic_pk = first_unfinished.topic_pk AND x.fan_out_cursor IS NOT NULL ORDER BY x.event_offset LIMIT 1;
    RETURN e;
END;
$$;

CREATE FUNCTION write_publish(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    now float8 := (w->>'now')::float8;
    capacity bigint := (w->>'limit')::bigint;
    event jsonb := w->'event';
    t topics;
    e topic_events;
    earlier boolean;
    pending bigint;
    offered record;
BEGIN
    SELECT * INTO t FROM topics WHERE name = event->>'topic';
    SELECT * INTO e FROM topic_events x WHERE x.topic_pk = t.pk AND x.id = event->>'id';
    IF FOUND THEN
        RETURN result_of('published_before', e.event_offset, e.fan_out_cursor IS NOT NULL, '0');
    END IF;
    e.topic_pk := t.pk;
    e.event_offset := t.last_offset + 1;
    e.id := event->>'id';
    e.body := decode(event->>'body', 'base64');
    e.sent_at := (event->>'sent_at')::float8;
    e.expires_at := (event->>'expires_at')::float8;
    e.delivery := event->>'delivery';
    e.consume := (event->>'consume')::boolean;
    e.sender := event->>'sender';
    e.event_id := event->>'event_id';
    e.last_subscription := coalesce((SELECT max(s.pk) FROM subscriptions s WHERE s.topic_pk = t.pk), 0);
    e.queued := e.delivery <> 'after_wait';
    earlier := (first_unfinished(t.pk)).event_offset IS NOT NULL;
    IF expired(e.expires_at, now) THEN
        e.queued := false;
        e.body := NULL;
        e.deleted_at := now;
    ELSIF capacity IS NOT NULL AND e.queued THEN
        SELECT count(*) INTO pending FROM topic_events x
        WHERE x.topic_pk = t.pk AND x.queued AND NOT expired(x.expires_at, now);
        IF pending >= capacity AND (earlier OR NOT e.consume OR (oldest_subscription(e, t.name)).pk IS NULL) THEN
            RETURN result_of('full', pending);
        END IF;
    END IF;
    e.fan_out_cursor := CASE WHEN earlier AND e.deleted_at IS NULL THEN 0 END;
    INSERT INTO topic_events SELECT e.*;
    UPDATE topics x SET last_offset = e.event_offset WHERE x.pk = t.pk;
    IF e.deleted_at IS NOT NULL OR earlier THEN
        RETURN result_of('published', e.event_offset, e.deleted_at IS NULL, '0');
    END IF;
    offered := offer_page(e, t.name, (w->>'page')::bigint, now);
    RETURN result_of('published', e.event_offset, offered.more, cardinality(offered.woken)::text, offered.woken);
END;
$$;

CREATE FUNCTION write_fan_out(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    requested bigint := (w->>'offset')::bigint;
    t topics;
    e topic_events;
    offered record;
BEGIN
    SELECT * INTO t FROM topics WHERE name = w->>'topic';
    IF NOT EXISTS (SELECT FROM topic_events x WHERE x.topic_pk = t.pk AND x.event_offset = requested
        AND x.fan_out_cursor IS NOT NULL) THEN
        RETURN result_of('published', requested, false, '0');
    END IF;
    e := first_unfinished(t.pk);
    offered := offer_page(e, t.name, (w->>'page')::bigint, (w->>'now')::float8);
    IF e.event_offset <> requested THEN
        RETURN result_of('published', requested, true, '0', offered.woken);
    END IF;
    RETURN result_of('published', requested, offered.more, cardinality(offered.woken)::text, offered.woken);
END;
$$;

-- A run has consumed an assignment: delete its event if no other run may get it.
CREATE FUNCTION on_event_consumed(of_run bigint, topic text, at_offset bigint, now float8) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    e topic_events;
BEGIN
    SELECT x.* INTO e FROM topic_events x JOIN topics t ON t.pk = x.topic_pk
    WHERE t.name = topic AND x.event_offset = at_offset AND x.deleted_at IS NULL;
    IF NOT FOUND THEN
        RETURN;
    ELSIF NOT e.consume THEN
        PERFORM delete_event_if_unreferenced(e, topic, now);
    ELSIF e.assigned_to = of_run THEN
        PERFORM delete_event(e, now);
    END IF;
END;
$$;

-- Mark messages as consumed. Returns how many were unread.
CREATE FUNCTION consume_messages(of_run bigint, numbers jsonb, now float8) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    message record;
    unread bigint := 0;
BEGIN
    FOR message IN
        UPDATE inbox i SET consumed_at = now, body = NULL
        FROM jsonb_array_elements_text(numbers) AS x
        CROSS JOIN LATERAL (  -- looks up each one separately, as in `message_number`
            SELECT m.ctid, m.number FROM inbox m
            WHERE m.run_pk = of_run AND m.number >= x::bigint AND m.consumed_at IS NULL
            ORDER BY m.number LIMIT 1
        ) AS m (row, number)
        WHERE i.ctid = m.row AND m.number = x::bigint
        RETURNING i.kind, i.name, i.topic_offset
    LOOP
        unread := unread + 1;
        IF message.kind = 'assignment' THEN
            PERFORM on_event_consumed(of_run, message.name, message.topic_offset, now);
        END IF;
    END LOOP;
    RETURN unread;
END;
$$;

-- Remove unread assignments from an inbox and offer their events to the next subscriptions. Returns the runs that got
-- one.
CREATE FUNCTION release_assignments(of_run bigint, numbers jsonb, now float8) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    released bigint;
    message record;
    e topic_events;
    got text;
    woken text[] := '{}';
BEGIN
    FOR released IN SELECT n::bigint FROM jsonb_array_elements_text(numbers) AS n LOOP
        DELETE FROM inbox i
        WHERE i.run_pk = of_run AND i.number = released AND i.kind = 'assignment' AND i.consumed_at IS NULL
        RETURNING i.name, i.topic_offset INTO message;
        CONTINUE WHEN NOT FOUND;
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

-- Assign the first queued event of the topics to a run. If there is none, subscribe the run to all of them.
CREATE FUNCTION subscribe(run runs, wanted jsonb, now float8) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    at_target text := wanted->>'target';
    e topic_events;
    topic text;
BEGIN
    IF EXISTS (SELECT FROM subscriptions s WHERE s.run_pk = run.pk AND s.target = at_target) THEN
        RETURN;
    END IF;
    SELECT x.* INTO e
    FROM jsonb_array_elements_text(wanted->'topics') WITH ORDINALITY AS topic_list (name, nth)
    JOIN topics t ON t.name = topic_list.name
    CROSS JOIN LATERAL (
        SELECT q.* FROM topic_events q
        WHERE q.topic_pk = t.pk AND q.queued AND NOT expired(q.expires_at, now)
              AND (q.delivery <> 'after_create' OR q.sent_at >= run.created_at)
              AND NOT (q.consume AND q.fan_out_cursor IS NOT NULL)  -- older subscriptions come first
              AND NOT EXISTS (
                  SELECT FROM inbox i WHERE i.run_pk = run.pk AND i.id = assignment_id(t.name, q.event_offset))
        ORDER BY q.event_offset LIMIT 1
    ) AS x
    ORDER BY x.sent_at, topic_list.nth LIMIT 1;
    IF FOUND THEN
        topic := (SELECT t.name FROM topics t WHERE t.pk = e.topic_pk);
        PERFORM assign(e, topic, run.pk, at_target, now);
        RETURN;
    END IF;
    INSERT INTO subscriptions (topic_pk, run_pk, target)
    SELECT t.pk, run.pk, at_target FROM topics t
    WHERE t.name IN (SELECT jsonb_array_elements_text(wanted->'topics'));
END;
$$;
