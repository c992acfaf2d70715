-- abandon: give up claims that never forwarded, whether or not they were ever written.
-- Releases the claim's own lease (in doubt again if it had taken a doubt over). Where there is no record, or a released
--   one, it leaves the claim id as a mark, so that the claim itself finds the record closed to it if it arrives later.
-- Parameters: $1 rows, one bytea per claim: 1-32 record id, 33-64 fingerprint, 65-80 claim id, 81-82 its terms (their
--   position from 1, high byte first); from 83 on the key, a zero byte, the scope, both UTF-8.
--   $2 terms, what claims have in common, said once: a JSON array of {service, operation, recipe, on_in_doubt, lease_ms,
--   effect_ms, keep_ms}.
--   $3 the time (NULL: the database's clock, read once).
-- Result: one row: the time and the epoch. Every claim is given up when it returns.
-- Locks: the records, in the order of their ids, at most 200 ms each; a record of another's is locked, not written.
WITH settings AS MATERIALIZED (
  SELECT
    set_config('lock_timeout', '200ms', true),
    set_config('synchronous_commit', CASE WHEN current_setting('synchronous_commit') IN ('off', 'local') THEN 'on'
      ELSE current_setting('synchronous_commit') END, true),
    coalesce($3::timestamptz, clock_timestamp()) AS t
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
    t.keep_ms, s.t
  FROM settings s,
    (SELECT packed, n, position('\x00'::bytea IN substring(packed FROM 83)) - 1 AS key_length
      FROM unnest($1::bytea[]) WITH ORDINALITY x(packed, n)) u
    JOIN terms t ON t.term = get_byte(u.packed, 80) * 256 + get_byte(u.packed, 81)
), given_up AS (
  INSERT INTO :"schema".idempotency_record AS r (id, service, operation, scope, key, fingerprint, recipe, bound, state,
    claim, attempt, on_in_doubt, lease_ms, effect_ms, first_seen, expires_at)
  SELECT i.id, i.service, i.operation, i.scope, i.key, i.fingerprint, i.recipe, false, 'released', i.claim, 0,
    i.on_in_doubt, i.lease_ms, i.effect_ms, i.t, i.t + i.keep_ms * interval '1 ms'
  FROM input i
  ORDER BY i.id
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
