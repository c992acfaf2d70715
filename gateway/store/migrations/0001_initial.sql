-- 0001: records, replies, and the schema's own row. psql variable: schema.
CREATE SCHEMA IF NOT EXISTS :"schema";

CREATE TYPE :"schema".record_state AS ENUM ('in_progress', 'completed', 'released', 'in_doubt');
-- Ordered: a claim stores the greater of the record's and the request's, so a policy change only tightens.
CREATE TYPE :"schema".on_in_doubt AS ENUM ('run_again', 'probe', 'block');

-- One row. version: of this schema; compatible_since: the oldest code (by the version it knows) that may use it;
-- epoch: bumped by operators' changes, so that processes drop cached replies.
CREATE TABLE :"schema".idempotency_schema (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  version int NOT NULL,
  compatible_since int NOT NULL,
  epoch bigint NOT NULL DEFAULT 0
);
CREATE TABLE :"schema".idempotency_migration (
  version int PRIMARY KEY,
  name text NOT NULL,
  checksum text NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE :"schema".idempotency_record (
  id bytea PRIMARY KEY CHECK (octet_length(id) = 32),   -- the only unique index
  service text NOT NULL, operation text NOT NULL, scope text NOT NULL, key text NOT NULL,
  fingerprint bytea NOT NULL, recipe int NOT NULL,
  bound boolean NOT NULL,             -- an execution with this fingerprint may have had an effect
  state :"schema".record_state NOT NULL,
  claim uuid NOT NULL,                -- drawn by the gateway: the fence of every later write
  attempt int NOT NULL CHECK (attempt >= 0),   -- the number people see; 0 marks an abandoned claim
  reruns smallint NOT NULL DEFAULT 0 CHECK (reruns >= 0),   -- takeovers in a row of an open outcome (max_attempts)
  on_in_doubt :"schema".on_in_doubt NOT NULL,
  lease_ms int NOT NULL CHECK (lease_ms > 0),
  effect_ms int NOT NULL CHECK (effect_ms >= 0),
  locked_until timestamptz,           -- in_progress: end of the lease
  doubt_since timestamptz,            -- an execution of unknown outcome may have begun as late as this
  first_seen timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  status smallint,                    -- completed: the reply's
  reply_on date,                      -- completed: partition of the reply; NULL is a tombstone
  CHECK ((state = 'in_progress') = (locked_until IS NOT NULL)),
  CHECK (state <> 'in_doubt' OR doubt_since IS NOT NULL),
  CHECK (state IN ('in_progress', 'in_doubt') OR doubt_since IS NULL),
  CHECK ((state = 'completed') = (status IS NOT NULL)),
  CHECK (reply_on IS NULL OR state = 'completed')
) WITH (fillfactor = 50);             -- room for the completing update beside the row: HOT
CREATE INDEX idempotency_record_expiry ON :"schema".idempotency_record (expires_at);
CREATE INDEX idempotency_record_key ON :"schema".idempotency_record USING hash (key);

CREATE TABLE :"schema".idempotency_response (
  expires_on date NOT NULL, id bytea NOT NULL, claim uuid NOT NULL,
  head bytea NOT NULL, body bytea NOT NULL,
  PRIMARY KEY (expires_on, id, claim)
) PARTITION BY RANGE (expires_on);
ALTER TABLE :"schema".idempotency_response ALTER COLUMN body SET STORAGE EXTERNAL;

INSERT INTO :"schema".idempotency_schema (version, compatible_since) VALUES (1, 1);
