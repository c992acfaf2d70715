-- timeline: which cluster this is and on which timeline, so that the old primary of a split brain is recognised.
-- Not for a standby, which has no current one. A managed service may not let every role ask.
-- Parameters: none.
-- Result: one row.
-- Locks: none.
SELECT
  (SELECT system_identifier FROM pg_control_system()) AS system_identifier,
  ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int AS timeline
