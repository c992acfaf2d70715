-- Take the upkeep of a schema, or one part of it, until the transaction ends; never waits.
-- $1 schema, $2 part: 'run' (a whole run of the janitor) or 'open' (opening partitions).
-- Result: alone, whether it was free. Locks: one transaction-scoped advisory lock, no row.
-- The holder idles in its transaction while another connection works: timeouts that would end it are lifted.
SELECT pg_try_advisory_xact_lock(hashtextextended(format('idempotency janitor %s %s', $2::text, $1::text), 0)) AS alone,
       (SELECT count(set_config(s.name, '0', true))
          FROM pg_settings AS s
         WHERE s.name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')) AS lifted
