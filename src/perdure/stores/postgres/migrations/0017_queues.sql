-- Work queues: tables, and the writes that concern queues and places.
--
-- A run of a queue has one row in `places` from its creation to its end: first it waits, then it holds a slot. The
-- store compares and sets. The engine plans which runs are admitted, from a view of one version of the queue, and
-- `write_admit` applies the plan only to that version. Starts and ends do not touch the row of their queue, so that
-- they do not wait for each other.
--
-- `partitions` counts the places of a partition. The exception is the partition '' of a queue without partitions: its
-- counter would be such a shared row, so its places are counted when the queue is viewed (`is_counted` is false).
--
-- Locks are taken in one order: topics by name, runs by id, dedupe keys, partitions, queues by name, new runs by id.
-- All of them are taken before the first write. The lock on a run's row protects its place. Admissions lock further
-- runs, but only without waiting (SKIP LOCKED). So no two transactions wait for each other.

CREATE TABLE queues (
    pk             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name           text COLLATE "C" NOT NULL UNIQUE,
    version        bigint NOT NULL DEFAULT 1,
    declared       text NOT NULL,                   -- JSON, as are override and paused
    override       text NOT NULL,
    paused         text,
    is_partitioned boolean NOT NULL,                -- stays true, so that counters are never given up
    count_cap      bigint NOT NULL,                 -- waiting places are counted up to this number
    state          bytea NOT NULL DEFAULT '',
    taken          integer NOT NULL DEFAULT 0,      -- by the last admission
    is_full        boolean NOT NULL DEFAULT false,  -- the last admission found `max_waiting` places
    last_turn      bigint NOT NULL DEFAULT 0        -- the highest that a take has set
) WITH (fillfactor = 50);

CREATE SEQUENCE place_numbers;

CREATE TABLE places (
    run_pk      bigint PRIMARY KEY,
    queue_pk    bigint NOT NULL,
    partition   text COLLATE "C" NOT NULL,
    priority    integer NOT NULL,
    number      bigint NOT NULL,
    since       float8 NOT NULL,
    held        boolean NOT NULL DEFAULT false,  -- it holds a slot; otherwise it waits
    admitted_at float8,
    eligible_at float8,                          -- while it is delayed
    expires_at  float8,
    dedupe      text COLLATE "C",
    latest_at   float8,                          -- debounce: it is eligible at this time at the latest
    joined_by   text                             -- `created_by` of the last start that changed it
) WITH (
    fillfactor = 80,
    -- Places come and go with the runs: without frequent cleanup an admission would read many dead index entries.
    autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_cost_delay = 0
);

CREATE INDEX places_waiting ON places (queue_pk, partition, priority, number) WHERE NOT held AND eligible_at IS NULL;
CREATE INDEX places_delayed ON places (queue_pk, eligible_at, number) WHERE eligible_at IS NOT NULL;
CREATE INDEX places_expiring ON places (queue_pk, expires_at) WHERE NOT held AND expires_at IS NOT NULL;
CREATE INDEX places_held ON places (queue_pk, partition) WHERE held;
CREATE INDEX places_by_key ON places (queue_pk, dedupe) WHERE dedupe IS NOT NULL;

CREATE TABLE partitions (
    pk         bigint GENERATED ALWAYS AS IDENTITY UNIQUE,  -- the order in which partitions are locked
    queue_pk   bigint NOT NULL,
    partition  text COLLATE "C" NOT NULL,
    is_counted boolean NOT NULL,
    waiting    integer NOT NULL DEFAULT 0,  -- places that are not delayed
    delayed    integer NOT NULL DEFAULT 0,
    held       integer NOT NULL DEFAULT 0,
    turn       bigint NOT NULL,
    state      bytea NOT NULL DEFAULT '',
    taken      integer NOT NULL DEFAULT 0,  -- by the last take
    slot_limit bigint,                      -- of the last take, as is ready_at
    ready_at   float8,
    keep_until float8,
    override   text,                        -- JSON
    -- Whether the partition is ready as soon as `ready_at` has passed. Only counted partitions are listed.
    is_listed  boolean GENERATED ALWAYS AS (waiting > 0 AND (slot_limit IS NULL OR held < slot_limit)) STORED,
    is_unused  boolean GENERATED ALWAYS AS (waiting + delayed + held = 0 AND override IS NULL) STORED,
    PRIMARY KEY (queue_pk, partition)
) WITH (fillfactor = 50);

CREATE INDEX partitions_ready ON partitions (queue_pk, turn, partition) WHERE is_listed AND ready_at IS NULL;
CREATE INDEX partitions_timed ON partitions (queue_pk, ready_at) WHERE is_listed AND ready_at IS NOT NULL;
CREATE INDEX partitions_unused ON partitions (queue_pk, partition) WHERE is_unused;

ALTER TABLE runs
    ADD COLUMN queue           text COLLATE "C",
    ADD COLUMN partition       text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN priority        integer NOT NULL DEFAULT 0,
    ADD COLUMN waiting         boolean NOT NULL DEFAULT false,  -- has a place that no admission has taken
    ADD COLUMN gate            text COLLATE "C" NOT NULL DEFAULT '',
    ADD COLUMN ancestor_queues text,                            -- JSON
    ADD CONSTRAINT runs_waiting_not_due CHECK (NOT (waiting AND wake_at IS NOT NULL));

DROP INDEX runs_due;
CREATE INDEX runs_due ON runs (pool, gate, workflow, version, wake_at, id, shard)
    WHERE owner IS NULL AND wake_at IS NOT NULL AND ended_at IS NULL;
CREATE INDEX runs_by_queue ON runs (queue, created_at, id) WHERE queue IS NOT NULL;

CREATE FUNCTION queue_hint(queue text) RETURNS text LANGUAGE sql IMMUTABLE
RETURN 'queue:' || queue;

-- --- locks ---------------------------------------------------------------------------------------------------------

-- The places that writes request, each with the queue's name. `creates` are new runs in one write.
CREATE FUNCTION requested_places(writes jsonb) RETURNS TABLE (queue text, place jsonb) LANGUAGE sql IMMUTABLE
BEGIN ATOMIC
    SELECT w->'place'->>'queue', w->'place' FROM jsonb_array_elements(writes) AS w WHERE w ? 'place'
    UNION ALL
    SELECT c->'place'->>'queue', c->'place'
    FROM jsonb_array_elements(writes) AS w CROSS JOIN LATERAL jsonb_array_elements(w->'creates') AS c;
END;

-- The runs that starts of these writes may change by joining their places.
CREATE FUNCTION runs_to_join(writes jsonb) RETURNS text[] LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT coalesce(array_agg(r.id), '{}')
    FROM requested_places(writes) AS n
    CROSS JOIN LATERAL (SELECT x.pk FROM queues x WHERE x.name = n.queue OFFSET 0) AS q
    CROSS JOIN LATERAL (
        SELECT x.run_pk FROM places x WHERE x.queue_pk = q.pk AND x.dedupe = n.place->>'dedupe' OFFSET 0) AS p
    CROSS JOIN LATERAL (SELECT x.id FROM runs x WHERE x.pk = p.run_pk OFFSET 0) AS r
    WHERE n.place->>'on_duplicate' = 'replace' OR (n.place->>'debounce')::boolean;
END;

-- Lock dedupe keys, so that no other start creates a run with one of them. A lock stands for many keys, which bounds
-- the memory of the server.
CREATE FUNCTION lock_keys(writes jsonb) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('places'::regclass::oid::integer, k.bucket)
    FROM (
        SELECT DISTINCT hashtext(n.queue || chr(1) || (n.place->>'dedupe')) & 1023 AS bucket
        FROM requested_places(writes) AS n WHERE n.place ? 'dedupe'
        ORDER BY bucket OFFSET 0
    ) AS k;
END;
$$;

-- Lock counted partitions, given as pairs of queue and name, in the order of their keys. Creates missing ones.
CREATE FUNCTION lock_partitions(of_queues text[], names text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    wanted_queues bigint[];
    wanted_names text[];
    turns bigint[];
    found_pks bigint[];
    locked bigint;
BEGIN
    SELECT array_agg(w.pk ORDER BY w.pk, w.name), array_agg(w.name ORDER BY w.pk, w.name),
           array_agg(w.last_turn + 1 ORDER BY w.pk, w.name)
    INTO wanted_queues, wanted_names, turns
    FROM (
        SELECT DISTINCT q.pk, n.name COLLATE "C" AS name, q.last_turn
        FROM unnest(of_queues, names) AS n (queue, name)
        CROSS JOIN LATERAL (SELECT * FROM queues x WHERE x.name = n.queue OFFSET 0) AS q
        WHERE q.is_partitioned OR n.name <> ''
    ) AS w;
    IF wanted_queues IS NULL THEN
        RETURN;
    END IF;
    LOOP
        found_pks := partition_pks(wanted_queues, wanted_names);
        IF array_position(found_pks, NULL) IS NOT NULL THEN
            INSERT INTO partitions (queue_pk, partition, is_counted, turn)
            SELECT w.queue_pk, w.name, true, w.turn
            FROM unnest(wanted_queues, wanted_names, turns, found_pks) AS w (queue_pk, name, turn, found)
            WHERE w.found IS NULL ORDER BY w.queue_pk, w.name COLLATE "C"
            ON CONFLICT DO NOTHING;
            found_pks := partition_pks(wanted_queues, wanted_names);
        END IF;
        PERFORM FROM partitions p WHERE p.pk = ANY (found_pks) ORDER BY p.pk FOR NO KEY UPDATE;
        GET DIAGNOSTICS locked = ROW_COUNT;
        EXIT WHEN locked = cardinality(found_pks);  -- otherwise `prune_runs` has just deleted one
    END LOOP;
END;
$$;

-- The keys of partitions in the given order, NULL for a missing one. OFFSET 0: looks up each one separately, here and
-- below. A plan made while there were few rows may otherwise scan all of them for each write.
CREATE FUNCTION partition_pks(of_queues bigint[], names text[]) RETURNS bigint[] LANGUAGE sql VOLATILE
BEGIN ATOMIC
    SELECT array_agg(p.pk ORDER BY w.nth)
    FROM unnest(of_queues, names) WITH ORDINALITY AS w (queue_pk, name, nth)
    LEFT JOIN LATERAL (
        SELECT x.pk FROM partitions x WHERE x.queue_pk = w.queue_pk AND x.partition = w.name COLLATE "C" OFFSET 0
    ) AS p ON true;
END;

-- Take the locks of a batch that come after those of its runs. `leaving` are locked runs that may leave their queues.
CREATE FUNCTION lock_queues(writes jsonb, leaving text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    of_queues text[];
    names text[];
    settings boolean := coalesce(writes @? '$[*] ? (@.queues == "settings")', false);
BEGIN
    IF settings AND changes_counting(writes) THEN
        LOCK TABLE places IN SHARE ROW EXCLUSIVE MODE;  -- waits for all transactions that have changed places
    ELSE
        LOCK TABLE places IN ROW EXCLUSIVE MODE;  -- from here on no queue begins to count a partition
    END IF;
    IF writes @? '$[*].place.dedupe' THEN
        PERFORM lock_keys(writes);
    END IF;
    SELECT array_agg(n.queue), array_agg(n.partition) INTO of_queues, names
    FROM (
        SELECT n.queue, n.place->>'partition' AS partition FROM requested_places(writes) AS n
        UNION
        SELECT r.queue, r.partition
        FROM unnest(leaving) AS l (id)
        CROSS JOIN LATERAL (SELECT * FROM runs x WHERE x.id = l.id OFFSET 0) AS r WHERE r.queue IS NOT NULL
    ) AS n;
    IF settings THEN
        SELECT of_queues || array_agg(n.queue), names || array_agg(n.partition) INTO of_queues, names
        FROM partitions_of_settings(writes) AS n;
    END IF;
    PERFORM lock_partitions(of_queues, names);
    IF settings THEN
        PERFORM FROM queues q
        WHERE q.name = ANY (ARRAY(SELECT w->>'queue' FROM jsonb_array_elements(writes) AS w
                                  WHERE w->>'queues' = 'settings'))
        ORDER BY q.name FOR NO KEY UPDATE;
    END IF;
END;
$$;

-- The partitions that admissions and changes of settings may write.
CREATE FUNCTION partitions_of_settings(writes jsonb) RETURNS TABLE (queue text, partition text) LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT w->>'queue', t->>'partition'
    FROM jsonb_array_elements(writes) AS w CROSS JOIN LATERAL jsonb_array_elements(w->'takes') AS t
    UNION
    SELECT w->>'queue', p.partition
    FROM jsonb_array_elements(writes) AS w
    CROSS JOIN LATERAL (SELECT x.pk FROM queues x WHERE x.name = w->>'queue' OFFSET 0) AS q
    CROSS JOIN LATERAL (
        SELECT x.partition FROM places x WHERE x.queue_pk = q.pk AND x.eligible_at <= (w->>'now')::float8
        ORDER BY x.eligible_at, x.number LIMIT (w->>'promote')::bigint
    ) AS p
    WHERE w->>'kind' = 'admit' AND (w->>'promote')::bigint > 0
    UNION
    SELECT w->>'queue', w->>'partition' FROM jsonb_array_elements(writes) AS w WHERE w->>'kind' = 'configure_partition'
    UNION
    SELECT w->>'queue', p.partition
    FROM jsonb_array_elements(writes) AS w
    CROSS JOIN LATERAL (SELECT * FROM queues x WHERE x.name = w->>'queue' OFFSET 0) AS q
    CROSS JOIN LATERAL (SELECT x.partition FROM partitions x WHERE x.queue_pk = q.pk AND x.is_counted OFFSET 0) AS p
    WHERE w->>'kind' = 'configure_queue' AND q.version = (w->>'base')::bigint;
END;

-- Whether a queue without partitions gets them: its places in the partition '' must be counted from then on.
CREATE FUNCTION changes_counting(writes jsonb) RETURNS boolean LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT EXISTS (
        SELECT FROM jsonb_array_elements(writes) AS w
        CROSS JOIN LATERAL (SELECT * FROM queues x WHERE x.name = w->>'queue' OFFSET 0) AS q
        WHERE w->>'kind' = 'configure_queue' AND (w->>'partitioned')::boolean AND NOT q.is_partitioned);
END;

-- --- arrivals and departures ---------------------------------------------------------------------------------------

-- Add the place of a run whose row says that it waits. Returns the change hint of its queue.
CREATE FUNCTION add_place(of_run bigint, place jsonb, since float8) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    name text := place->>'partition';
    is_delayed boolean := place ? 'eligible_at';
    q record;
BEGIN
    SELECT x.pk, x.name, x.is_partitioned INTO q FROM queues x WHERE x.name = place->>'queue';
    INSERT INTO places (
        run_pk, queue_pk, partition, priority, number, since, eligible_at, expires_at, dedupe, latest_at)
    VALUES (of_run, q.pk, name, (place->>'priority')::integer, nextval('place_numbers'), add_place.since,
            (place->>'eligible_at')::float8, (place->>'expires_at')::float8, place->>'dedupe',
            (place->>'latest_at')::float8);
    IF q.is_partitioned OR name <> '' THEN
        IF NOT EXISTS (SELECT FROM partitions p WHERE p.queue_pk = q.pk AND p.partition = name COLLATE "C") THEN
            PERFORM lock_partitions(ARRAY[q.name], ARRAY[name]);  -- this batch has created the queue
        END IF;
        UPDATE partitions p
        SET waiting = p.waiting + (NOT is_delayed)::integer, delayed = p.delayed + is_delayed::integer
        WHERE p.queue_pk = q.pk AND p.partition = name COLLATE "C" AND p.is_counted;
    END IF;
    RETURN queue_hint(q.name);
END;
$$;

-- Delete the places of these runs, if they have any. Returns the change hints of queues with a returned slot.
--
-- The end of a run that is committed alone locks its partition here. So the update finds partitions by their key, which
-- also holds for a row that another transaction has just changed.
CREATE FUNCTION leave_queues(of_runs bigint[]) RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    hints text[];
    pks bigint[];
    slots bigint[];
    eligible bigint[];
    later bigint[];
BEGIN
    WITH deleted AS (
        DELETE FROM places p WHERE p.run_pk = ANY (of_runs) RETURNING p.queue_pk, p.partition, p.held, p.eligible_at
    )
    SELECT array_agg(DISTINCT queue_hint(q.name)) FILTER (WHERE g.held > 0), array_agg(l.pk), array_agg(g.held),
           array_agg(g.waiting), array_agg(g.delayed)
    INTO hints, pks, slots, eligible, later
    FROM (
        SELECT x.queue_pk, x.partition, count(*) FILTER (WHERE x.held) AS held,
               count(*) FILTER (WHERE NOT x.held AND x.eligible_at IS NULL) AS waiting,
               count(*) FILTER (WHERE x.eligible_at IS NOT NULL) AS delayed
        FROM deleted x GROUP BY x.queue_pk, x.partition
    ) AS g
    CROSS JOIN LATERAL (SELECT y.name FROM queues y WHERE y.pk = g.queue_pk OFFSET 0) AS q
    LEFT JOIN LATERAL (
        SELECT y.pk FROM partitions y
        WHERE y.queue_pk = g.queue_pk AND y.partition = g.partition AND y.is_counted OFFSET 0
    ) AS l ON true;
    UPDATE partitions p
    SET held = p.held - slots[array_position(pks, p.pk)], waiting = p.waiting - eligible[array_position(pks, p.pk)],
        delayed = p.delayed - later[array_position(pks, p.pk)]
    WHERE p.pk = ANY (pks);
    RETURN coalesce(hints, '{}');
END;
$$;

-- Return why a new run gets no place: its queue is unknown or full, or it joins another run. NULL: it gets its place.
CREATE FUNCTION refuse_place(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    place jsonb := w->'place';
    q queues;
    joined write_result;
BEGIN
    SELECT * INTO q FROM queues x WHERE x.name = place->>'queue';
    IF NOT FOUND THEN
        RETURN result_of('queue_missing');
    END IF;
    IF place ? 'dedupe' THEN
        joined := join_place(w, q);
        IF joined.result_kind IS NOT NULL THEN
            RETURN joined;
        END IF;
    END IF;
    RETURN CASE WHEN q.is_full THEN result_of('full', waiting_places(q.pk, 10001)) END;
END;
$$;

-- The number of places that wait in a queue, up to `cap`. ORDER BY makes the planner use the indexes.
CREATE FUNCTION waiting_places(of_queue bigint, cap bigint) RETURNS bigint LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT count(*) FROM (
        (SELECT 1 FROM places p WHERE p.queue_pk = of_queue AND NOT p.held AND p.eligible_at IS NULL
         ORDER BY p.partition, p.priority, p.number LIMIT cap)
        UNION ALL
        (SELECT 1 FROM places p WHERE p.queue_pk = of_queue AND p.eligible_at IS NOT NULL
         ORDER BY p.eligible_at LIMIT cap)
        LIMIT cap
    ) AS x;
END;

-- Let a start join the place that has its key: the one that waits, else the latest. Returns NULL if it creates a run. A
-- repeated call finds its own id. (`queue_rules.find_duplicate` states the rule.)
--
-- The key is locked. A run that is to be changed has probably been locked with the other runs; if the key has moved to
-- another run, that run is locked only without waiting. Otherwise the whole batch is repeated.
CREATE FUNCTION join_place(w jsonb, q queues) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    place jsonb := w->'place';
    replaces boolean := place->>'on_duplicate' = 'replace';
    debounces boolean := (place->>'debounce')::boolean;
    changes boolean := replaces OR debounces;
    first places;
    first_id text;
    until float8;
    hints text[];
BEGIN
    IF changes THEN
        PERFORM FROM runs r
        WHERE r.pk = ANY (ARRAY(
            SELECT p.run_pk FROM places p WHERE p.queue_pk = q.pk AND p.dedupe = place->>'dedupe' COLLATE "C"))
        FOR NO KEY UPDATE NOWAIT;
    END IF;
    SELECT p.* INTO first FROM places p
    WHERE p.queue_pk = q.pk AND p.dedupe = place->>'dedupe' COLLATE "C"
    ORDER BY p.joined_by IS NOT DISTINCT FROM w->>'created_by' DESC, p.held, p.number DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    first_id := (SELECT r.id FROM runs r WHERE r.pk = first.run_pk);
    IF first.joined_by = w->>'created_by' THEN
        changes := false;
    ELSIF first.held AND changes THEN
        RETURN NULL;
    END IF;
    IF changes THEN
        until := CASE WHEN debounces AND first.eligible_at IS NOT NULL
                      THEN least((place->>'eligible_at')::float8, first.latest_at) ELSE first.eligible_at END;
        UPDATE places p SET joined_by = w->>'created_by', eligible_at = until WHERE p.run_pk = first.run_pk;
        IF until IS DISTINCT FROM first.eligible_at THEN
            hints := ARRAY[queue_hint(q.name)];
        END IF;
    END IF;
    IF replaces AND changes THEN
        UPDATE runs r
        SET workflow = w->>'workflow', version = (w->>'version')::bigint, pool = w->>'pool',
            input = decode(w->>'input', 'base64'), updated_at = (w->>'created_at')::float8
        WHERE r.pk = first.run_pk;
    END IF;
    RETURN result_of('joined', flag => replaces, label => first_id,
                     note => CASE WHEN first.held THEN 'held' ELSE 'waiting' END, changed => hints);
END;
$$;

-- --- writes of queues ----------------------------------------------------------------------------------------------

-- Make delayed places whose time has come eligible, with new numbers. Returns how many. Places behind one whose run
-- another transaction has locked, and places of a partition that it has locked, stay delayed until the next admission.
CREATE FUNCTION promote_places(q queues, now float8, lim bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    of_runs bigint[];
    names text[];
    lockable text[];
    promoted integer;
BEGIN
    SELECT array_agg(d.run_pk ORDER BY d.eligible_at, d.number), array_agg(d.partition ORDER BY d.eligible_at, d.number)
    INTO of_runs, names
    FROM (
        SELECT p.run_pk, p.partition, p.eligible_at, p.number FROM places p
        WHERE p.queue_pk = q.pk AND p.eligible_at <= now ORDER BY p.eligible_at, p.number LIMIT lim
    ) AS d;
    IF of_runs IS NULL THEN
        RETURN 0;
    END IF;
    lockable := ARRAY(
        SELECT p.partition FROM partitions p
        WHERE p.queue_pk = q.pk AND p.partition = ANY (names) AND p.is_counted
        FOR NO KEY UPDATE SKIP LOCKED);
    IF NOT q.is_partitioned THEN
        lockable := lockable || ''::text;
    END IF;
    SELECT array_agg(l.pk ORDER BY l.nth), array_agg(l.partition ORDER BY l.nth) INTO of_runs, names
    FROM (
        SELECT x.pk, x.nth, names[x.nth] AS partition, row_number() OVER (ORDER BY x.nth) AS rank
        FROM (
            SELECT r.pk, array_position(of_runs, r.pk) AS nth FROM runs r WHERE r.pk = ANY (of_runs)
            FOR NO KEY UPDATE SKIP LOCKED
        ) AS x
    ) AS l
    WHERE l.nth = l.rank AND l.partition = ANY (lockable);
    UPDATE places p SET eligible_at = NULL, number = n.number
    FROM (
        SELECT l.row, nextval('place_numbers') AS number
        FROM (
            SELECT y.row
            FROM unnest(of_runs) WITH ORDINALITY AS x (pk, nth)
            CROSS JOIN LATERAL (
                SELECT z.ctid FROM places z WHERE z.run_pk = x.pk AND z.eligible_at <= now OFFSET 0) AS y (row)
            ORDER BY x.nth OFFSET 0
        ) AS l
        OFFSET 0
    ) AS n
    WHERE p.ctid = n.row;
    GET DIAGNOSTICS promoted = ROW_COUNT;
    UPDATE partitions p SET waiting = p.waiting + c.count, delayed = p.delayed - c.count
    FROM (
        SELECT l.row, g.count
        FROM (SELECT x.name, count(*) AS count FROM unnest(names) AS x (name) GROUP BY x.name) AS g
        CROSS JOIN LATERAL (
            SELECT y.ctid FROM partitions y WHERE y.queue_pk = q.pk AND y.partition = g.name COLLATE "C" OFFSET 0
        ) AS l (row)
        OFFSET 0
    ) AS c
    WHERE p.ctid = c.row AND p.is_counted;
    RETURN promoted;
END;
$$;

-- The first places of each take that an admission may take now, as arrays: run, id of the run, and number of the take.
-- Runs are locked without waiting. A run that another transaction has locked ends its take, so that no place is passed
-- over because of a lock.
CREATE FUNCTION take_places(w jsonb, q queues, OUT of_runs bigint[], OUT ids text[], OUT takes integer[])
LANGUAGE plpgsql AS $$
DECLARE
    now float8 := (w->>'now')::float8;
    serves text[] := ARRAY(
        SELECT (s->>0) || chr(1) || (s->>1) || chr(1) || (s->>2) FROM jsonb_array_elements(w->'serves') AS s);
    ranks bigint[];
BEGIN
    SELECT array_agg(c.run_pk ORDER BY t.nth, c.rank), array_agg(t.nth ORDER BY t.nth, c.rank),
           array_agg(c.rank ORDER BY t.nth, c.rank)
    INTO of_runs, takes, ranks
    FROM jsonb_array_elements(w->'takes') WITH ORDINALITY AS t (take, nth)
    CROSS JOIN LATERAL (
        SELECT x.run_pk, row_number() OVER (ORDER BY x.priority, x.number) AS rank
        FROM (
            SELECT p.run_pk, p.priority, p.number, p.expires_at FROM places p
            WHERE p.queue_pk = q.pk AND p.partition = t.take->>'partition' AND NOT p.held AND p.eligible_at IS NULL
            ORDER BY p.priority, p.number LIMIT (w->>'scan')::bigint
        ) AS x
        CROSS JOIN LATERAL (
            SELECT r.held, r.workflow || chr(1) || r.version || chr(1) || r.pool AS served
            FROM runs r WHERE r.pk = x.run_pk OFFSET 0
        ) AS r
        WHERE r.held IS NULL AND r.served = ANY (serves) AND NOT expired(x.expires_at, now)
        ORDER BY x.priority, x.number LIMIT (t.take->>'count')::bigint
    ) AS c;
    SELECT array_agg(l.pk ORDER BY l.take, l.rank), array_agg(l.id ORDER BY l.take, l.rank),
           array_agg(l.take ORDER BY l.take, l.rank)
    INTO of_runs, ids, takes
    FROM (
        SELECT y.*, row_number() OVER (PARTITION BY y.take ORDER BY y.rank) AS locked_rank
        FROM (
            SELECT x.pk, x.id, x.may_be_taken, takes[x.nth] AS take, ranks[x.nth] AS rank
            FROM (
                SELECT r.pk, r.id, r.waiting AND r.held IS NULL AS may_be_taken, array_position(of_runs, r.pk) AS nth
                FROM runs r WHERE r.pk = ANY (of_runs)
                FOR NO KEY UPDATE SKIP LOCKED
            ) AS x
        ) AS y
    ) AS l
    WHERE l.rank = l.locked_rank AND l.may_be_taken;
END;
$$;

-- Store what an admission has done with its partitions. `of_takes` has the number of its take for each admitted run.
CREATE FUNCTION store_takes(takes jsonb, q queues, of_takes integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF q.version = 1 THEN  -- this batch may have created the queue
        PERFORM lock_partitions(ARRAY(SELECT q.name FROM jsonb_array_elements(takes)),
                                ARRAY(SELECT t->>'partition' FROM jsonb_array_elements(takes) AS t));
    END IF;
    IF NOT q.is_partitioned AND takes @? '$[*] ? (@.partition == "")' THEN
        INSERT INTO partitions (queue_pk, partition, is_counted, turn) VALUES (q.pk, '', false, q.last_turn + 1)
        ON CONFLICT DO NOTHING;
    END IF;
    UPDATE partitions p
    SET turn = t.turn, state = t.state, taken = t.admitted, slot_limit = t.slot_limit, ready_at = t.ready_at,
        keep_until = t.keep_until,
        waiting = CASE WHEN p.is_counted THEN p.waiting - t.admitted ELSE 0 END,
        held = CASE WHEN p.is_counted THEN p.held + t.admitted ELSE 0 END
    FROM (
        SELECT l.row, (x.take->>'turn')::bigint AS turn, decode(x.take->>'state', 'base64') AS state,
               (x.take->>'limit')::bigint AS slot_limit, (x.take->>'ready_at')::float8 AS ready_at,
               (x.take->>'keep_until')::float8 AS keep_until,
               cardinality(array_positions(of_takes, x.nth::integer)) AS admitted
        FROM jsonb_array_elements(takes) WITH ORDINALITY AS x (take, nth)
        CROSS JOIN LATERAL (
            SELECT y.ctid FROM partitions y WHERE y.queue_pk = q.pk AND y.partition = x.take->>'partition' OFFSET 0
        ) AS l (row)
        OFFSET 0
    ) AS t
    WHERE p.ctid = t.row;
END;
$$;

-- Admit runs as planned, if the queue has not changed since the plan was made.
CREATE FUNCTION write_admit(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    now float8 := (w->>'now')::float8;
    q queues;
    promoted integer := 0;
    of_runs bigint[];
    admitted text[];
    of_takes integer[];
BEGIN
    SELECT * INTO q FROM queues x WHERE x.name = w->>'queue' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN result_of('queue_missing');
    ELSIF q.version <> (w->>'base')::bigint
          OR abs(now - extract(epoch FROM clock_timestamp())::float8) > (w->>'tolerance')::float8 THEN
        RETURN result_of('superseded');
    END IF;
    IF (w->>'promote')::bigint > 0 THEN
        promoted := promote_places(q, now, (w->>'promote')::bigint);
    END IF;
    IF w ? 'takes' THEN
        SELECT t.of_runs, t.ids, t.takes INTO of_runs, admitted, of_takes FROM take_places(w, q) AS t;
        IF of_runs IS NOT NULL THEN
            UPDATE places p SET held = true, admitted_at = now WHERE p.run_pk = ANY (of_runs);
            UPDATE runs r
            SET waiting = false, wake_at = now, updated_at = now,
                gate = CASE WHEN (w->>'gate')::boolean THEN q.name ELSE '' END
            WHERE r.pk = ANY (of_runs);
        END IF;
        PERFORM store_takes(w->'takes', q, coalesce(of_takes, '{}'));
    END IF;
    UPDATE queues x
    SET version = q.version + 1, state = decode(w->>'state', 'base64'), taken = coalesce(cardinality(of_runs), 0),
        is_full = (w->>'full')::boolean,
        last_turn = greatest(q.last_turn, (SELECT max((t->>'turn')::bigint) FROM jsonb_array_elements(w->'takes') AS t))
    WHERE x.pk = q.pk;
    RETURN result_of('admitted', q.version + 1, label => promoted::text,
                     note => coalesce(to_json(admitted)::text, '[]'), changed => admitted);
END;
$$;

-- Create a queue, or replace its settings. All partitions forget their limits, because a limit may have risen.
CREATE FUNCTION write_configure_queue(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    q queues;
    hints text[] := ARRAY[queue_hint(w->>'queue')];
BEGIN
    SELECT * INTO q FROM queues x WHERE x.name = w->>'queue' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        IF (w->>'base')::bigint <> 0 THEN
            RETURN result_of('superseded');
        END IF;
        INSERT INTO queues (name, declared, override, paused, is_partitioned, count_cap)
        VALUES (w->>'queue', w->>'declared', w->>'override', w->>'paused', (w->>'partitioned')::boolean,
                (w->>'count_cap')::bigint)
        ON CONFLICT DO NOTHING;
        IF NOT FOUND THEN  -- another transaction has created it meanwhile
            RETURN write_configure_queue(w);
        END IF;
        RETURN result_of('stored', 1, changed => hints);
    ELSIF (q.declared, q.override, q.paused) IS NOT DISTINCT FROM (w->>'declared', w->>'override', w->>'paused') THEN
        RETURN result_of('stored', q.version);
    ELSIF q.version <> (w->>'base')::bigint THEN
        RETURN result_of('superseded');
    END IF;
    IF (w->>'partitioned')::boolean AND NOT q.is_partitioned THEN
        PERFORM count_first_partition(q);
    END IF;
    UPDATE partitions p SET slot_limit = NULL, ready_at = NULL
    WHERE p.queue_pk = q.pk AND (p.slot_limit IS NOT NULL OR p.ready_at IS NOT NULL);
    UPDATE queues x
    SET version = q.version + 1, declared = w->>'declared', override = w->>'override', paused = w->>'paused',
        is_partitioned = q.is_partitioned OR (w->>'partitioned')::boolean, count_cap = (w->>'count_cap')::bigint
    WHERE x.pk = q.pk;
    RETURN result_of('stored', q.version + 1, changed => hints);
END;
$$;

-- Begin to count the places of the partition '' of a queue. `lock_queues` has locked the table of places.
CREATE FUNCTION count_first_partition(q queues) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO partitions AS p (queue_pk, partition, is_counted, waiting, delayed, held, turn)
    SELECT q.pk, '', true, count(*) FILTER (WHERE NOT x.held AND x.eligible_at IS NULL),
           count(*) FILTER (WHERE x.eligible_at IS NOT NULL), count(*) FILTER (WHERE x.held), q.last_turn + 1
    FROM places x WHERE x.queue_pk = q.pk AND x.partition = ''
    ON CONFLICT (queue_pk, partition) DO UPDATE
    SET is_counted = true, waiting = excluded.waiting, delayed = excluded.delayed, held = excluded.held;
END;
$$;

-- Set or remove the override of a partition.
CREATE FUNCTION write_configure_partition(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    q queues;
    before text;
BEGIN
    SELECT * INTO q FROM queues x WHERE x.name = w->>'queue' FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN result_of('queue_missing');
    END IF;
    before := (SELECT p.override FROM partitions p WHERE p.queue_pk = q.pk AND p.partition = w->>'partition');
    IF before IS NOT DISTINCT FROM w->>'override' THEN
        RETURN result_of('stored', q.version);
    END IF;
    INSERT INTO partitions AS p (queue_pk, partition, is_counted, turn, override)
    VALUES (q.pk, w->>'partition', q.is_partitioned OR w->>'partition' <> '', q.last_turn + 1, w->>'override')
    ON CONFLICT (queue_pk, partition) DO UPDATE
    SET override = excluded.override, slot_limit = NULL, ready_at = NULL;
    UPDATE queues x SET version = q.version + 1 WHERE x.pk = q.pk;
    RETURN result_of('stored', q.version + 1, changed => ARRAY[queue_hint(q.name)]);
END;
$$;

-- Give a waiting run another priority. It keeps its number.
CREATE FUNCTION write_requeue(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    new_priority integer := (w->>'priority')::integer;
    p record;
BEGIN
    SELECT x.held, x.priority, q.name INTO p FROM places x JOIN queues q ON q.pk = x.queue_pk WHERE x.run_pk = r.pk;
    IF NOT FOUND OR p.name <> w->>'queue' OR (p.held AND p.priority <> new_priority) THEN
        RETURN result_of('not_queued');
    ELSIF p.priority = new_priority THEN
        RETURN result_of('committed');
    END IF;
    UPDATE places x SET priority = new_priority WHERE x.run_pk = r.pk;
    UPDATE runs x SET priority = new_priority WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => ARRAY[queue_hint(w->>'queue')]);
END;
$$;

-- Take a run out of its queue. A run that waited is due; an unread pause holds it when it executes.
CREATE FUNCTION write_leave_queue(w jsonb, r runs) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    hints text[];
BEGIN
    IF NOT EXISTS (
        SELECT FROM places p JOIN queues q ON q.pk = p.queue_pk WHERE p.run_pk = r.pk AND q.name = w->>'queue')
    THEN
        RETURN result_of('not_queued');
    END IF;
    hints := leave_queues(ARRAY[r.pk]);
    UPDATE runs x
    SET gate = '', waiting = false, updated_at = (w->>'now')::float8,
        held = CASE WHEN NOT r.waiting THEN x.held END,
        wake_at = CASE WHEN r.waiting THEN (w->>'now')::float8 ELSE x.wake_at END
    WHERE x.pk = r.pk;
    RETURN result_of('committed', changed => hints || r.id);
END;
$$;
