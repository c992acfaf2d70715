-- How long ago the oldest forgotten record expired that is still there.
-- $1 expiry to start from or NULL, $2 time (janitor_clock). Result: seconds, 0 if there is none. Locks: none.
SELECT coalesce(extract(epoch FROM $2::timestamptz - (
  SELECT r.expires_at
    FROM :"schema".idempotency_record AS r
   WHERE :"schema".forgotten(r, $2::timestamptz)
     AND r.expires_at >= coalesce($1::timestamptz, '-infinity')
   ORDER BY r.expires_at
   LIMIT 1)), 0)::float8 AS seconds
