-- settle: end leases, each fenced by its claim id, and keep the replies of completed ones, all in one commit.
-- Parameters: $1 rows, one bytea per settlement: 1-32 record id, 33-48 claim id, 49-50 its terms (their position from
--   1, high byte first); from 51 on the head, without one nothing is kept of the reply, or there is none.
--   $2 terms, what settlements have in common, said once: a JSON array of {settlement (complete, release, hold),
--   forwarded, binds, status, keep_ms (retention)}. $3 bodies, one per settlement (NULL: only the head is kept).
--   $4 the time (NULL: the database's clock, read once).
-- Result: one row per settlement, n its position from 1, outcome: done; already (mine, and so ended before); lost (no
--   record under this claim id); refused (mine, but ended otherwise).
-- Locks: the records, in the order of their ids, at most 200 ms each; writes them and one reply each.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($4::timestamptz, clock_timestamp()) AS t
), terms AS MATERIALIZED (
  SELECT *
  FROM ROWS FROM (json_to_recordset($2::json) AS (settlement text, forwarded boolean, binds boolean, status smallint,
    keep_ms bigint))
    WITH ORDINALITY t(settlement, forwarded, binds, status, keep_ms, term)
), input AS MATERIALIZED (
  SELECT u.n,
    substring(u.packed FROM 1 FOR 32) AS id,
    encode(substring(u.packed FROM 33 FOR 16), 'hex')::uuid AS claim,
    CASE WHEN octet_length(u.packed) > 50 THEN substring(u.packed FROM 51) END AS head,
    u.body, t.settlement, t.forwarded, t.binds, t.status, t.keep_ms, s.t
  FROM settings s,
    unnest($1::bytea[], $3::bytea[]) WITH ORDINALITY u(packed, body, n)
    JOIN terms t ON t.term = get_byte(u.packed, 48) * 256 + get_byte(u.packed, 49)
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
