-- server: what a new connection has met, before anything is written through it.
-- Parameters: none.
-- Result: one row.
-- Locks: none.
SELECT
  current_setting('server_version_num')::int AS version,
  current_setting('transaction_read_only')::bool OR pg_is_in_recovery() AS read_only,
  current_setting('transaction_isolation') AS isolation,
  current_setting('synchronous_commit') AS synchronous_commit,
  current_setting('fsync')::bool AS fsync
