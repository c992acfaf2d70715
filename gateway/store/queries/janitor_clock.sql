-- The present, by the database's clock.
-- $1 time to take instead, or NULL. Result: t. Locks: none.
SELECT coalesce($1::timestamptz, clock_timestamp()) AS t
