-- settle: end leases, each fenced by its claim id, and keep the replies of completed ones, all in one commit.
-- Parameters, arrays of one entry per settlement: $1 record ids, $2 claim ids, $3 settlements (complete, release, hold),
--   $4 forwarded, $5 binds, $6 statuses, $7 keep_ms (retention), $8 heads (NULL: nothing is kept of the reply,
--   or there is none), $9 bodies (NULL: only the head is kept). $10 the time (NULL: the database's clock, read once).
-- Result: one row per settlement, n its position from 1, outcome: done; already (mine, and so ended before); lost (no
--   record under this claim id); refused (mine, but ended otherwise).
-- Locks: the records, in the order of their ids, at most 200 ms each; writes them and one reply each.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($10::timestamptz, clock_timestamp()) AS t
), input AS MATERIALIZED (
  SELECT u.n, u.id, u.claim, u.settlement, u.forwarded, u.binds, u.status, u.keep_ms, u.head, u.body, s.t
  FROM settings s,
    unnest($1::bytea[], $2::uuid[], $3::text[], $4::bool[], $5::bool[], $6::smallint[], $7::bigint[], $8::bytea[],
      $9::bytea[])
      WITH ORDINALITY u(id, claim, settlement, forwarded, binds, status, keep_ms, head, body, n)
), mine AS MATERIALIZED (   -- read as it is under the lock, not as the snapshot had it; `ends`: the state to write
  SELECT i.n, r.state, i.settlement, i.forwarded, i.binds, i.status, i.head, i.body, i.t,
    r.id, r.claim, greatest(r.expires_at, i.t + i.keep_ms * interval '1 ms') AS kept_until,
    CASE
      WHEN i.settlement = 'complete' THEN 'completed'
      WHEN i.settlement = 'hold' THEN 'in_doubt'
      WHEN r.doubt_since IS NOT NULL AND NOT i.forwarded THEN 'in_doubt'   -- back to what it was
      ELSE 'released'
    END::text:::"schema".record_state AS ends
  FROM input i
  JOIN :"schema".idempotency_record r ON r.id = i.id AND r.claim = i.claim
  ORDER BY r.id
  FOR NO KEY UPDATE OF r
), done AS (
  UPDATE :"schema".idempotency_record r SET
    state = m.ends,
    locked_until = NULL,
    doubt_since = CASE WHEN m.ends <> 'in_doubt' THEN NULL
      WHEN m.forwarded THEN m.t
      ELSE coalesce(r.doubt_since, m.t) END,
    bound = r.bound OR m.binds,
    -- A takeover that forwarded nothing does not count; a known outcome starts the count anew.
    reruns = CASE WHEN m.ends <> 'in_doubt' THEN 0
      WHEN m.forwarded OR r.doubt_since IS NULL THEN r.reruns
      ELSE greatest(r.reruns - 1, 0) END,
    status = CASE WHEN m.ends = 'completed' THEN m.status END,
    expires_at = CASE WHEN m.ends = 'completed' THEN m.kept_until ELSE r.expires_at END,
    reply_on = CASE WHEN m.ends = 'completed' AND m.head IS NOT NULL THEN (m.kept_until AT TIME ZONE 'UTC')::date END
  FROM mine m
  WHERE r.id = m.id AND r.claim = m.claim
    AND (r.state = 'in_progress' OR (r.state = 'in_doubt' AND m.ends <> 'in_doubt'))
  RETURNING m.n, r.id, r.claim, r.reply_on, m.head, m.body
), kept AS (
  INSERT INTO :"schema".idempotency_response (expires_on, id, claim, head, body)
  SELECT d.reply_on, d.id, d.claim, d.head, d.body
  FROM done d
  WHERE d.reply_on IS NOT NULL
)
SELECT i.n::int AS n,
  CASE
    WHEN d.n IS NOT NULL THEN 'done'
    WHEN m.n IS NULL THEN 'lost'
    WHEN m.state = m.ends THEN 'already'
    ELSE 'refused'
  END AS outcome,
  extract(epoch FROM i.t)::float8 AS t,
  (SELECT epoch FROM :"schema".idempotency_schema) AS epoch
FROM input i
LEFT JOIN mine m ON m.n = i.n
LEFT JOIN done d ON d.n = i.n
