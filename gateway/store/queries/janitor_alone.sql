-- Take the upkeep of a schema, or one part of it, until the transaction ends; never waits.
-- $1 schema, $2 part: 'run' (a whole run of the janitor) or 'open' (opening partitions).
-- Result: alone, whether it was free. Locks: one transaction-scoped advisory lock, no row.
SELECT pg_try_advisory_xact_lock(hashtextextended(format('idempotency janitor %s %s', $2::text, $1::text), 0)) AS alone
