-- Held runs, newest first, for queries. `runs_held` finds those of a workflow and version.

CREATE INDEX runs_held_newest ON runs (created_at, id) WHERE held_kind IS NOT NULL;
