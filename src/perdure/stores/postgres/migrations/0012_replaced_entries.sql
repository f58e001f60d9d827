-- Progress of running steps: a turn deletes the earlier versions of its entries (`extras.replaced`, by position), so that
-- a step that reports its progress for days keeps one row. The turn appends after them, so the last position of the run
-- has a row and the fence stays.

CREATE OR REPLACE FUNCTION drop_entries(run runs, w jsonb) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    dropped jsonb := w->'extras'->'dropped';
    replaced jsonb := w->'extras'->'replaced';
    added jsonb := coalesce(w->'entries', '[]');
BEGIN
    IF replaced IS NOT NULL THEN
        DELETE FROM entries e
        USING jsonb_array_elements_text(replaced) AS earlier (position)
        WHERE e.run_pk = run.pk AND e.position = earlier.position::bigint;
    END IF;
    IF w ? 'restart' THEN
        PERFORM start_generation(run, w->'restart');
        added := coalesce(w->'restart'->'entries', '[]');
    ELSIF dropped IS NULL THEN
        RETURN added;
    END IF;
    DELETE FROM entries e
    USING jsonb_array_elements_text('[""]'::jsonb || dropped) AS removed (location)
    WHERE e.run_pk = run.pk AND (e.location = removed.location
                                 OR (removed.location <> '' AND starts_with(e.location, removed.location || '/')))
          AND (removed.location <> '' OR e.kind = 'marker');
    UPDATE runs r
    SET fence = (w->>'base')::bigint
            + greatest(1, coalesce(jsonb_array_length(w->'entries'), 0), jsonb_array_length(added))
    WHERE r.pk = run.pk;
    RETURN added;
END;
$$;
