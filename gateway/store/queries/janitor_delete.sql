-- Delete forgotten records, oldest expiry first.
-- $1 most rows, $2 expiry to start from or NULL, $3 time (janitor_clock). Result: deleted, reached (the last expiry).
-- Locks: the rows it deletes; locked ones are skipped. A record prolonged meanwhile is judged again as it is then.
-- The time is a parameter and not clock_timestamp(): only so can it be an index condition. Starting from the last
-- expiry reached spares the walk over entries of deleted rows that a long reader keeps alive.
WITH chosen AS MATERIALIZED (   -- a plain subquery could be run twice and choose twice
  SELECT r.id
    FROM :"schema".idempotency_record AS r
   WHERE :"schema".forgotten(r, $3::timestamptz)
     AND r.expires_at >= coalesce($2::timestamptz, '-infinity')
   ORDER BY r.expires_at
   LIMIT $1
     FOR UPDATE SKIP LOCKED
),
gone AS (
  DELETE FROM :"schema".idempotency_record AS r USING chosen WHERE r.id = chosen.id RETURNING r.expires_at
)
SELECT count(*) AS deleted, max(expires_at) AS reached FROM gone
