-- The statements that open one partition of the reply table.
-- $1 schema, $2 first day, $3 day after the last one. Result: statements, to be run in one transaction.
-- Locks (theirs): SHARE UPDATE EXCLUSIVE on the reply table, so no reader or writer waits.
-- The CHECK says the bounds before ATTACH (no scan) and after DETACH (nothing left to add).
SELECT format($ddl$
CREATE TABLE %1$I.%2$I (
  LIKE %1$I.idempotency_response INCLUDING ALL,
  CONSTRAINT %3$I CHECK (expires_on >= date %4$L AND expires_on < date %5$L)
);
ALTER TABLE %1$I.idempotency_response ATTACH PARTITION %1$I.%2$I FOR VALUES FROM (%4$L) TO (%5$L)
$ddl$, $1::text, p.name, p.name || '_days', to_char($2::date, 'YYYY-MM-DD'), to_char($3::date, 'YYYY-MM-DD')) AS statements
  FROM (SELECT 'idempotency_response_' || to_char($2::date, 'YYYYMMDD') AS name) AS p
