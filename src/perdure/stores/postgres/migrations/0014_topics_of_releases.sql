-- The topics of the assignments that writes of this batch release. Turns name them `released_assignments`; under the
-- name that the function read before, it found none, and the topics were not locked.
CREATE OR REPLACE FUNCTION topics_of_releases(writes jsonb) RETURNS SETOF text LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT i.name
    FROM (
        SELECT w->>'run_id' AS run_id, n::bigint AS number
        FROM jsonb_array_elements(writes) AS w
        CROSS JOIN LATERAL jsonb_array_elements_text(
            CASE w->>'kind' WHEN 'finalize' THEN w->'returned' ELSE w->'extras'->'released_assignments' END) AS n
        WHERE w->>'kind' IN ('turn', 'finalize')
        OFFSET 0
    ) AS g
    CROSS JOIN LATERAL (SELECT x.pk FROM runs x WHERE x.id = g.run_id OFFSET 0) AS r
    CROSS JOIN LATERAL (
        SELECT x.name FROM inbox x WHERE x.run_pk = r.pk AND x.number = g.number AND x.kind = 'assignment' OFFSET 0
    ) AS i;
END;
