-- claim: ask for leases, one row per record: insert it, take it over where that is allowed, or say what is in the way.
-- Parameters, arrays of one entry per claim: $1 record ids, $2 services, $3 operations, $4 scopes, $5 keys,
--   $6 fingerprints, $7 recipes, $8 claim ids, $9 on_in_doubt, $10 lease_ms, $11 effect_ms, $12 keep_ms.
--   Scalars: $13 calm_ms (for how long contact with this database was undisturbed; NULL: always), $14 max_attempts,
--   $15 the time (NULL: the database's clock, read once).
-- Result: one row per claim, n its position from 1. acquired: attempt and doubt (an execution of open outcome was taken
--   over) are of the written row. Else what the snapshot shows. again: something changed in between, ask again.
-- Locks: the rows that it writes, in the order of their ids, at most 200 ms each. A row in the way is neither locked
--   nor written.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($15::timestamptz, clock_timestamp()) AS t
), input AS MATERIALIZED (
  SELECT u.n, u.id, u.service, u.operation, u.scope, u.key, u.fingerprint, u.recipe, u.claim,
    u.on_in_doubt::text:::"schema".on_in_doubt AS on_in_doubt, u.lease_ms, u.effect_ms, u.keep_ms, s.t,
    s.t - $13::bigint * interval '1 ms' AS calm_from
  FROM settings s,
    unnest($1::bytea[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::int[], $8::uuid[], $9::text[],
      $10::int[], $11::int[], $12::bigint[])
      WITH ORDINALITY u(id, service, operation, scope, key, fingerprint, recipe, claim, on_in_doubt, lease_ms,
        effect_ms, keep_ms, n)
), seen AS MATERIALIZED (
  SELECT i.n, r.state, r.bound, r.fingerprint, r.recipe, r.claim, r.status, r.reply_on, r.first_seen,
    r.expires_at - i.t AS keeps,
    :"schema".is_open(r, i.t) AS open,
    :"schema".lease_end(r) - i.t AS remaining,
    :"schema".runs_again_at(r, i.on_in_doubt, $14::int, i.calm_from) - i.t AS again_in,
    same.identity,
    same.identity AND :"schema".takeable(r, i.claim, i.fingerprint, i.recipe, i.on_in_doubt, $14::int, i.calm_from, i.t)
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
    AND :"schema".takeable(r, excluded.claim, excluded.fingerprint, excluded.recipe, excluded.on_in_doubt, $14::int,
      excluded.first_seen - $13::bigint * interval '1 ms', excluded.first_seen)
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
  s.claim,
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
