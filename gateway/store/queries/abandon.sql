-- abandon: give up claims that never forwarded, whether or not they were ever written.
-- Releases the claim's own lease (in doubt again if it had taken a doubt over). Where there is no record, or a released
--   one, it leaves the claim id as a mark, so that the claim itself finds the record closed to it if it arrives later.
-- Parameters, arrays of one entry per claim: $1 record ids, $2 services, $3 operations, $4 scopes, $5 keys,
--   $6 fingerprints, $7 recipes, $8 claim ids, $9 on_in_doubt, $10 lease_ms, $11 effect_ms, $12 keep_ms.
--   $13 the time (NULL: the database's clock, read once).
-- Result: one row: the time and the epoch. Every claim is given up when it returns.
-- Locks: the records, in the order of their ids, at most 200 ms each; a record of another's is locked, not written.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($13::timestamptz, clock_timestamp()) AS t
), given_up AS (
  INSERT INTO :"schema".idempotency_record AS r (id, service, operation, scope, key, fingerprint, recipe, bound, state,
    claim, attempt, on_in_doubt, lease_ms, effect_ms, first_seen, expires_at)
  SELECT u.id, u.service, u.operation, u.scope, u.key, u.fingerprint, u.recipe, false, 'released', u.claim, 0,
    u.on_in_doubt::text:::"schema".on_in_doubt, u.lease_ms, u.effect_ms, s.t, s.t + u.keep_ms * interval '1 ms'
  FROM settings s,
    unnest($1::bytea[], $2::text[], $3::text[], $4::text[], $5::text[], $6::bytea[], $7::int[], $8::uuid[], $9::text[],
      $10::int[], $11::int[], $12::bigint[])
      u(id, service, operation, scope, key, fingerprint, recipe, claim, on_in_doubt, lease_ms, effect_ms, keep_ms)
  ORDER BY u.id
  ON CONFLICT (id) DO UPDATE SET
    claim = excluded.claim,
    state = CASE WHEN r.doubt_since IS NULL THEN 'released' ELSE 'in_doubt' END::text:::"schema".record_state,
    locked_until = NULL,
    attempt = CASE WHEN r.state = 'released' THEN r.attempt ELSE r.attempt - 1 END,
    reruns = CASE WHEN r.doubt_since IS NULL THEN r.reruns ELSE greatest(r.reruns - 1, 0) END
  WHERE (r.claim = excluded.claim AND r.state = 'in_progress') OR (r.claim <> excluded.claim AND r.state = 'released')
)
SELECT extract(epoch FROM s.t)::float8 AS t, (SELECT epoch FROM :"schema".idempotency_schema) AS epoch
FROM settings s
