-- schema: the schema's own row.
-- Parameters: none.
-- Result: one row: its version, the oldest code that may use it, and the epoch of operators' changes.
-- Locks: none.
SELECT version, compatible_since, epoch FROM :"schema".idempotency_schema
