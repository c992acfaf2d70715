-- Former partitions of the reply table that were detached and not dropped yet, known by their names.
-- $1 schema. Result: name; over, a query (its $1: a day) whether every reply in it expired before that day; and the
-- statement that drops it. Locks: none.
SELECT c.relname::text AS name,
       format('SELECT NOT EXISTS (SELECT FROM %I.%I WHERE expires_on >= $1)', $1::text, c.relname) AS over,
       format('DROP TABLE IF EXISTS %I.%I', $1::text, c.relname) AS remove
  FROM pg_class AS c
  JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = $1::text
   AND c.relkind = 'r'
   AND NOT c.relispartition
   AND c.relname ~ '^idempotency_response_[0-9]{8}$'
 ORDER BY c.relname
