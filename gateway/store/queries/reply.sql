-- reply: a stored reply, by its whole key, so that one partition is planned and locked.
-- Parameters: $1 the day it expires, $2 record id, $3 claim id (16 bytes).
-- Result: one row; head is NULL when nothing of the reply is kept, body when its body is not.
-- Locks: none.
SELECT q.head, q.body, s.epoch
FROM :"schema".idempotency_schema s
LEFT JOIN :"schema".idempotency_response q ON q.expires_on = $1::date AND q.id = $2::bytea AND q.claim = encode($3::bytea, 'hex')::uuid
