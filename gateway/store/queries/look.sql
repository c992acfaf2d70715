-- look: whether a record is completed, for a holder that lost its lease.
-- Parameters: $1 record id, $2 the time (NULL: the database's clock).
-- Result: one row; status is NULL when there is no such record or it is not completed.
-- Locks: none.
SELECT r.status, uuid_send(r.claim) AS claim, r.reply_on, r.fingerprint, r.recipe,
  extract(epoch FROM r.first_seen)::float8 AS first_seen,
  (extract(epoch FROM r.expires_at - coalesce($2::timestamptz, clock_timestamp())) * 1000)::bigint AS keeps_ms,
  s.epoch
FROM :"schema".idempotency_schema s
LEFT JOIN :"schema".idempotency_record r ON r.id = $1::bytea AND r.state = 'completed'
