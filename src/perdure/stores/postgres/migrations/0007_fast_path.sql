-- The fast path for a single write (ADR 13): a new run that its worker owns, and a turn of one entry that may end its
-- run.
--
-- It takes half of the time of `commit_write`: arguments are scalars instead of JSON, and there is no statement beyond
-- those that the locks need. Each function applies the common case and returns true, or writes nothing and returns
-- false. Then the client sends the same write to `commit_write`, which has the rules. No result other than success is
-- decided here.

-- Create a run that its worker owns. Declines if the id is taken or the worker is fenced.
CREATE FUNCTION fast_create_run(
    run_id text, workflow text, version bigint, input bytea, created_at float8, created_by text, pool text,
    shard integer, generation integer, epoch integer, run_attempt integer, original_workflow text, original_input bytea,
    parent text, attached boolean, owner text, deadline_at float8, retention float8, seed text, tags jsonb)
RETURNS boolean LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
#variable_conflict use_variable
BEGIN
    INSERT INTO runs (
        id, workflow, version, input, created_at, created_by, seed, pool, shard, status, generation, epoch,
        run_attempt, original_workflow, original_input, parent, attached, tags, first_executed_at, updated_at, owner,
        deadline_at, retention)
    SELECT run_id, workflow, version, input, created_at, created_by, seed, pool, shard, 'running', generation, epoch,
           run_attempt, original_workflow, original_input, parent, attached, tags, created_at, created_at, w.id,
           deadline_at, retention
    FROM workers w WHERE w.id = owner AND NOT w.fenced FOR KEY SHARE
    ON CONFLICT DO NOTHING;
    RETURN FOUND;
END;
$$;

-- Commit a turn of one entry. `ends` is the status with which the run ends; NULL: the run does not end, and the
-- following arguments are not used.
--
-- The turn is applied (rule 7 of the acceptance rule in stores/protocol.py) if none of rules 1 to 6 can apply;
-- otherwise the function declines. Rules 1, 3 and 5 are checked by the first query, since an ended run has no owner.
-- Rules 2, 4 and 6 are checked by the INSERT; a turn that is stored already has moved the position.
--
-- An end on this path notifies no observer and releases nothing, so it declines for a run with observers, messages or
-- subscriptions. Observers are checked twice. The check before the lock avoids a lock that would have to reach the
-- disk for nothing. The check after it is the valid one.
CREATE FUNCTION fast_commit_turn(
    of_run text, worker text, base bigint, seen bigint, turn text, location text, kind text, name text, status text,
    call_seq bigint, ordinal bigint, seq bigint, value bytea, error text, attempts integer, generation integer,
    started_at float8, settled_at float8, due_at float8, fingerprint bytea, detail bytea, ends text, now float8,
    result bytea, failure text, drift text, recoveries integer, ended_at float8, prune_at float8)
RETURNS boolean LANGUAGE plpgsql
SET search_path FROM CURRENT
SET plan_cache_mode = force_generic_plan
SET enable_seqscan = off
SET enable_hashjoin = off
SET enable_mergejoin = off
SET jit = off
AS $$
#variable_conflict use_variable
DECLARE
    run_pk bigint;
    fence bigint;
BEGIN
    SELECT r.pk, r.fence INTO run_pk, fence FROM runs r
    WHERE r.id = of_run AND r.owner = worker AND NOT r.has_new_messages AND r.last_message_no <= seen
          AND (ends IS NULL OR r.last_message_no = 0 AND NOT EXISTS (SELECT FROM observers o WHERE o.run_pk = r.pk))
    FOR NO KEY UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO entries (
        run_pk, position, turn_id, location, kind, name, status, call_seq, ordinal, seq, value, error, attempts,
        generation, started_at, settled_at, due_at, fingerprint, detail)
    SELECT run_pk, base + 1, turn, location, kind, name, status, call_seq, ordinal, seq, value, error, attempts,
           generation, started_at, settled_at, due_at, fingerprint, detail
    WHERE base = greatest(fence, (SELECT max(e.position) FROM entries e WHERE e.run_pk = run_pk), 0)
          AND EXISTS (SELECT FROM workers x WHERE x.id = worker AND NOT x.fenced)
          AND (ends IS NULL OR NOT EXISTS (SELECT FROM observers o WHERE o.run_pk = run_pk)
                               AND NOT EXISTS (SELECT FROM subscriptions s WHERE s.run_pk = run_pk));
    IF FOUND AND ends IS NOT NULL THEN
        UPDATE runs r
        SET status = ends, owner = NULL, wake_at = NULL, waits = NULL, held = NULL, held_kind = NULL, drift = drift,
            recoveries = recoveries, result = result, error = failure, ended_at = ended_at, prune_at = prune_at,
            updated_at = now
        WHERE r.pk = run_pk;
    END IF;
    RETURN FOUND;
END;
$$;
