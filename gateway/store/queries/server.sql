-- server: what a new connection has met, before anything is written through it.
-- Parameters: none.
-- Result: one row. `timeline` is NULL on a standby, which has no current one.
-- Locks: none.
SELECT
  current_setting('server_version_num')::int AS version,
  current_setting('transaction_read_only')::bool OR pg_is_in_recovery() AS read_only,
  current_setting('transaction_isolation') AS isolation,
  current_setting('synchronous_commit') AS synchronous_commit,
  current_setting('fsync')::bool AS fsync,
  current_setting('synchronous_standby_names') <> '' AS synchronous_standby,
  (SELECT system_identifier FROM pg_control_system()) AS system_identifier,
  CASE WHEN NOT pg_is_in_recovery() THEN ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int END AS timeline
