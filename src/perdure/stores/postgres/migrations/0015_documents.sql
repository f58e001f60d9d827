-- Documents: small versioned records that perdure stores for itself, written by compare-and-set.
--
-- Versions come from a sequence, so that none is given twice, even if a document is deleted and created again. In a
-- batch documents are written last and in the order of (kind, id). So two batches lock them in one order.

CREATE SEQUENCE document_versions;

CREATE TABLE documents (
    kind       text COLLATE "C" NOT NULL,
    id         text COLLATE "C" NOT NULL,
    version    bigint NOT NULL,
    body       bytea NOT NULL,
    write_id   text NOT NULL,  -- of the last write: a repeated call finds its own
    due_at     float8,
    expires_at float8,
    PRIMARY KEY (kind, id)
) WITH (fillfactor = 80);

CREATE INDEX documents_due ON documents (kind, due_at, id) WHERE due_at IS NOT NULL;
CREATE INDEX documents_expiring ON documents (expires_at) WHERE expires_at IS NOT NULL;

-- Write or delete a document. Other processes are notified of its kind if it is due earlier than before.
CREATE FUNCTION write_document(w jsonb) RETURNS write_result LANGUAGE plpgsql AS $$
DECLARE
    is_deleted boolean := NOT w ? 'body';
    due float8 := (w->>'due_at')::float8;
    base bigint := (w->>'base')::bigint;
    d documents;
BEGIN
    SELECT * INTO d FROM documents x WHERE x.kind = w->>'document_kind' AND x.id = w->>'id' FOR UPDATE;
    IF d.write_id = w->>'write_id' AND NOT is_deleted THEN
        RETURN result_of('stored', d.version);
    ELSIF d.kind IS NULL AND is_deleted THEN
        RETURN result_of('stored', 0);
    ELSIF coalesce(d.version, 0) <> base THEN
        RETURN result_of('superseded');
    ELSIF is_deleted THEN
        DELETE FROM documents x WHERE x.kind = d.kind AND x.id = d.id;
    ELSIF d.kind IS NOT NULL THEN
        UPDATE documents x
        SET version = nextval('document_versions'), body = decode(w->>'body', 'base64'), write_id = w->>'write_id',
            due_at = due, expires_at = (w->>'expires_at')::float8
        WHERE x.kind = d.kind AND x.id = d.id
        RETURNING x.version INTO base;
    ELSE
        INSERT INTO documents (kind, id, version, body, write_id, due_at, expires_at)
        VALUES (w->>'document_kind', w->>'id', nextval('document_versions'), decode(w->>'body', 'base64'),
                w->>'write_id', due, (w->>'expires_at')::float8)
        ON CONFLICT ON CONSTRAINT documents_pkey DO NOTHING
        RETURNING version INTO base;
        IF NOT FOUND THEN  -- another transaction has created it meanwhile, perhaps for the same call
            RETURN write_document(w);
        END IF;
    END IF;
    IF w ? 'dead_letters' THEN
        PERFORM add_dead_letters(w->'dead_letters');
    END IF;
    RETURN result_of('stored', CASE WHEN is_deleted THEN 0 ELSE base END,
                     changed => CASE WHEN due < coalesce(d.due_at, 'infinity')
                                     THEN ARRAY['document:' || (w->>'document_kind')] END);
END;
$$;
