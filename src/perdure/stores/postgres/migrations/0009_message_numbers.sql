-- The messages of a fork are numbered after those that its history has received, which a rewind returns under their
-- numbers.

-- Create one run. A fork has a history and an inbox from the start.
CREATE OR REPLACE FUNCTION write_create(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    n record := add_runs(jsonb_build_array(w));
    received bigint := coalesce((w->>'received')::bigint, 0);
    r runs;
BEGIN
    IF n.created IS NULL THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        RETURN result_of(CASE WHEN r.created_by = w->>'created_by' THEN 'created_before' ELSE 'exists' END,
                        flag => coalesce(r.owner = w->>'owner', false));
    END IF;
    IF w ?| '{entries, inbox, received}' THEN
        SELECT * INTO r FROM runs x WHERE x.id = w->>'id';
        IF w ? 'entries' THEN
            PERFORM append_entries(r.pk, 0, NULL, w->'entries', r.created_at);
        END IF;
        PERFORM insert_message(r.pk, received + m.number, m.message)
        FROM jsonb_array_elements(coalesce(w->'inbox', '[]')) WITH ORDINALITY AS m (message, number);
        UPDATE runs x SET last_message_no = received + coalesce(jsonb_array_length(w->'inbox'), 0) WHERE x.pk = r.pk;
    END IF;
    RETURN result_of('created', flag => n.unowned IS NULL, changed => n.unowned);
END;
$$;
