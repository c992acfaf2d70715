-- The partitions of the reply table, from the catalogue; needs an ISO datestyle (janitor_limits).
-- $1 schema. Result: name, since (first day), until (day after the last one), pending (a detach was interrupted),
-- and the statement that detaches it, to be run outside a transaction block. Locks: none.
-- CONCURRENTLY: traffic never waits; FINALIZE ends an interrupted one.
SELECT c.relname::text AS name,
       coalesce((regexp_match(b.bounds, $re$FROM \('([^']+)'$re$))[1]::date, '-infinity') AS since,
       coalesce((regexp_match(b.bounds, $re$TO \('([^']+)'$re$))[1]::date, 'infinity') AS until,
       i.inhdetachpending AS pending,
       format('ALTER TABLE %I.idempotency_response DETACH PARTITION %I.%I %s', $1::text, n.nspname, c.relname,
              CASE WHEN i.inhdetachpending THEN 'FINALIZE' ELSE 'CONCURRENTLY' END) AS detach
  FROM pg_inherits AS i
  JOIN pg_class AS c ON c.oid = i.inhrelid
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
 CROSS JOIN LATERAL pg_get_expr(c.relpartbound, c.oid) AS b (bounds)
 WHERE i.inhparent = (SELECT p.oid
                        FROM pg_class AS p
                        JOIN pg_namespace AS s ON s.oid = p.relnamespace
                       WHERE s.nspname = $1::text AND p.relname = 'idempotency_response')
   AND b.bounds <> 'DEFAULT'
 ORDER BY i.inhdetachpending DESC, since
