-- claim: ask for leases, one row per record: insert it, take it over where that is allowed, or say what is in the way.
-- Parameters: $1 rows, one bytea per claim: 1-32 record id, 33-64 fingerprint, 65-80 claim id, 81-82 its terms (their
--   position from 1, high byte first); from 83 on the key, a zero byte, the scope, both UTF-8.
--   $2 terms, what claims have in common, said once: a JSON array of {service, operation, recipe, on_in_doubt, lease_ms,
--   effect_ms, keep_ms}.
--   Scalars: $3 calm_ms (for how long contact with this database was undisturbed; NULL: always), $4 max_attempts,
--   $5 the time (NULL: the database's clock, read once).
-- Result: one row per claim, n its position from 1. acquired: attempt and doubt (an execution of open outcome was taken
--   over) are of the written row. Else what the snapshot shows. again: something changed in between, ask again.
-- Locks: the rows that it writes, in the order of their ids, at most 200 ms each. A row in the way is neither locked
--   nor written.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($5::timestamptz, clock_timestamp()) AS t
), terms AS MATERIALIZED (
  SELECT *
  FROM ROWS FROM (json_to_recordset($2::json) AS (service text, operation text, recipe int, on_in_doubt text,
    lease_ms int, effect_ms int, keep_ms bigint))
    WITH ORDINALITY t(service, operation, recipe, on_in_doubt, lease_ms, effect_ms, keep_ms, term)
), input AS MATERIALIZED (
  SELECT u.n,
    substring(u.packed FROM 1 FOR 32) AS id,
    substring(u.packed FROM 33 FOR 32) AS fingerprint,
    encode(substring(u.packed FROM 65 FOR 16), 'hex')::uuid AS claim,
    convert_from(substring(u.packed FROM 83 FOR u.key_length), 'UTF8') AS key,
    convert_from(substring(u.packed FROM 84 + u.key_length), 'UTF8') AS scope,
    t.service, t.operation, t.recipe, t.on_in_doubt:::"schema".on_in_doubt AS on_in_doubt, t.lease_ms, t.effect_ms,
    t.keep_ms, s.t, s.t - $3::bigint * interval '1 ms' AS calm_from
  FROM settings s,
    (SELECT packed, n, position('\x00'::bytea IN substring(packed FROM 83)) - 1 AS key_length
      FROM unnest($1::bytea[]) WITH ORDINALITY x(packed, n)) u
    JOIN terms t ON t.term = get_byte(u.packed, 80) * 256 + get_byte(u.packed, 81)
), seen AS MATERIALIZED (
  SELECT i.n, r.state, r.bound, r.fingerprint, r.recipe, r.claim, r.status, r.reply_on, r.first_seen,
    r.expires_at - i.t AS keeps,
    :"schema".is_open(r, i.t) AS open,
    :"schema".lease_end(r) - i.t AS remaining,
    :"schema".runs_again_at(r, i.on_in_doubt, $4::int, i.calm_from) - i.t AS again_in,
    same.identity,
    same.identity AND :"schema".takeable(r, i.claim, i.fingerprint, i.recipe, i.on_in_doubt, $4::int, i.calm_from, i.t)
      AS takeable
  FROM input i
  JOIN :"schema".idempotency_record r ON r.id = i.id,
  LATERAL (SELECT :"schema".same_identity(r, i.service, i.operation, i.scope, i.key) AS identity) same
), won AS (
  INSERT INTO :"schema".idempotency_record AS r (id, service, operation, scope, key, fingerprint, recipe, bound, state,
    claim, attempt, on_in_doubt, lease_ms, effect_ms, locked_until, first_seen, expires_at)
  SELECT i.id, i.service, i.operation, i.scope, i.key, i.fingerprint, i.recipe, false, 'in_progress', i.claim, 1,
    i.on_in_doubt, i.lease_ms, i.effect_ms, i.t + i.lease_ms * interval '1 ms', i.t, i.t + i.keep_ms * interval '1 ms'
  FROM input i
  LEFT JOIN seen s USING (n)
  WHERE s.n IS NULL OR s.takeable
  ORDER BY i.id
  ON CONFLICT (id) DO UPDATE SET
    state = 'in_progress', claim = excluded.claim, fingerprint = excluded.fingerprint, recipe = excluded.recipe,
    lease_ms = excluded.lease_ms, status = NULL, reply_on = NULL,
    -- Four cases throughout: my own lease again, a forgotten record, a released one, one of open outcome.
    bound = CASE WHEN r.claim = excluded.claim THEN r.bound
      WHEN :"schema".forgotten(r, excluded.first_seen) THEN false
      ELSE r.bound OR r.state <> 'released' END,
    attempt = CASE WHEN r.claim = excluded.claim THEN r.attempt
      WHEN :"schema".forgotten(r, excluded.first_seen) THEN 1
      ELSE r.attempt + 1 END,
    reruns = CASE WHEN r.claim = excluded.claim THEN r.reruns
      WHEN :"schema".forgotten(r, excluded.first_seen) OR r.state = 'released' THEN 0
      ELSE r.reruns + 1 END,
    on_in_doubt = CASE WHEN r.claim <> excluded.claim AND :"schema".forgotten(r, excluded.first_seen)
      THEN excluded.on_in_doubt
      ELSE greatest(r.on_in_doubt, excluded.on_in_doubt) END,
    effect_ms = CASE WHEN r.claim <> excluded.claim
        AND (:"schema".forgotten(r, excluded.first_seen) OR r.state = 'released') THEN excluded.effect_ms
      ELSE greatest(r.effect_ms, excluded.effect_ms) END,
    locked_until = CASE WHEN r.claim = excluded.claim THEN greatest(r.locked_until, excluded.locked_until)
      ELSE excluded.locked_until END,
    doubt_since = CASE WHEN r.claim = excluded.claim THEN r.doubt_since
      WHEN :"schema".forgotten(r, excluded.first_seen) OR r.state = 'released' THEN NULL
      ELSE :"schema".open_since(r) END,
    first_seen = CASE WHEN r.claim <> excluded.claim AND :"schema".forgotten(r, excluded.first_seen)
      THEN excluded.first_seen
      ELSE r.first_seen END,
    expires_at = CASE WHEN r.claim = excluded.claim THEN r.expires_at
      ELSE greatest(r.expires_at, excluded.expires_at) END
  WHERE :"schema".same_identity(r, excluded.service, excluded.operation, excluded.scope, excluded.key)
    AND :"schema".takeable(r, excluded.claim, excluded.fingerprint, excluded.recipe, excluded.on_in_doubt, $4::int,
      excluded.first_seen - $3::bigint * interval '1 ms', excluded.first_seen)
  RETURNING r.id, r.attempt, r.doubt_since IS NOT NULL AS doubt
)
SELECT i.n::int AS n,
  w.id IS NOT NULL AS acquired,
  w.attempt,
  w.doubt,
  w.id IS NULL AND (s.n IS NULL OR s.takeable) AS again,
  s.identity,
  s.state::text AS state,
  s.open,
  s.fingerprint,
  s.recipe,
  uuid_send(s.claim) AS claim,
  s.status,
  s.reply_on,
  extract(epoch FROM s.first_seen)::float8 AS first_seen,
  (extract(epoch FROM s.keeps) * 1000)::bigint AS keeps_ms,
  (extract(epoch FROM s.remaining) * 1000)::bigint AS remaining_ms,
  (extract(epoch FROM s.again_in) * 1000)::bigint AS again_in_ms,
  extract(epoch FROM i.t)::float8 AS t,
  (SELECT epoch FROM :"schema".idempotency_schema) AS epoch
FROM input i
LEFT JOIN won w ON w.id = i.id
LEFT JOIN seen s ON s.n = i.n
