-- renew: prolong leases, each fenced by its claim id.
-- Parameters, arrays of one entry per lease: $1 record ids, $2 claim ids (16 bytes), $3 lease_ms. $4 the time (NULL: the database's).
-- Result: one row per lease, n its position from 1. renewed; or else mine: skipped because another statement has the row
--   locked, to be renewed at the next tick; neither: lost.
-- Locks: the rows that it writes, in the order of their ids; locked ones are skipped, never waited for.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($4::timestamptz, clock_timestamp()) AS t
), input AS MATERIALIZED (
  SELECT u.n, u.id, encode(u.claim, 'hex')::uuid AS claim, s.t, s.t + u.lease_ms * interval '1 ms' AS locked_until
  FROM settings s, unnest($1::bytea[], $2::bytea[], $3::int[]) WITH ORDINALITY u(id, claim, lease_ms, n)
), mine AS MATERIALIZED (
  SELECT i.n, i.id, i.claim, i.locked_until
  FROM input i
  JOIN :"schema".idempotency_record r ON r.id = i.id AND r.claim = i.claim
  WHERE r.state = 'in_progress'
  ORDER BY r.id
  FOR NO KEY UPDATE OF r SKIP LOCKED
), renewed AS (
  UPDATE :"schema".idempotency_record r
  SET locked_until = greatest(r.locked_until, m.locked_until)
  FROM mine m
  WHERE r.id = m.id AND r.claim = m.claim AND r.state = 'in_progress'
  RETURNING m.n
), held AS MATERIALIZED (   -- locked ones too
  SELECT i.n
  FROM input i
  JOIN :"schema".idempotency_record r ON r.id = i.id AND r.claim = i.claim
  WHERE r.state = 'in_progress'
)
SELECT i.n::int AS n,
  w.n IS NOT NULL AS renewed,
  h.n IS NOT NULL AS mine,
  extract(epoch FROM i.t)::float8 AS t,
  (SELECT epoch FROM :"schema".idempotency_schema) AS epoch
FROM input i
LEFT JOIN renewed w ON w.n = i.n
LEFT JOIN held h ON h.n = i.n
