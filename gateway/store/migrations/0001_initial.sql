-- 0001: records, replies, the protocol's predicates, and the schema's own row. psql variable: schema, which exists.
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
  CHECK (reply_on IS NULL OR state = 'completed'),
  CHECK (attempt > 0 OR NOT bound)
) WITH (fillfactor = 50);             -- room for the completing update beside the row: HOT
CREATE INDEX idempotency_record_expiry ON :"schema".idempotency_record (expires_at);
CREATE INDEX idempotency_record_key ON :"schema".idempotency_record USING hash (key);

CREATE TABLE :"schema".idempotency_response (
  expires_on date NOT NULL, id bytea NOT NULL, claim uuid NOT NULL,
  head bytea NOT NULL,
  body bytea,                         -- NULL: a tombstone that kept its head
  PRIMARY KEY (expires_on, id, claim)
) PARTITION BY RANGE (expires_on);
ALTER TABLE :"schema".idempotency_response ALTER COLUMN body SET STORAGE EXTERNAL;

-- ---- the predicates of the protocol, each in one place ------------------------------------------------------------
-- One expression each, not strict, stable: the planner puts them into the statement, so they cost no call and a column
-- stays an index condition. `t` is always the statement's one reading of the clock.

-- End of the lease of an in_progress record, NULL for any other. After a restart of the database every holder has one
-- lease to renew before anybody takes over.
CREATE FUNCTION :"schema".lease_end(r :"schema".idempotency_record) RETURNS timestamptz LANGUAGE sql STABLE RETURN
  CASE WHEN (r).locked_until IS NOT NULL
    THEN greatest((r).locked_until, pg_postmaster_start_time() + (r).lease_ms * interval '1 ms') END;

-- Nobody holds it and its outcome is open.
CREATE FUNCTION :"schema".is_open(r :"schema".idempotency_record, t timestamptz) RETURNS boolean LANGUAGE sql STABLE RETURN
  (r).state = 'in_doubt' OR coalesce(:"schema".lease_end(r) <= t, false);

-- The last moment at which an execution of open outcome may have begun: the end of the lease that ran out, or the
-- moment of the doubt.
CREATE FUNCTION :"schema".open_since(r :"schema".idempotency_record) RETURNS timestamptz LANGUAGE sql STABLE RETURN
  coalesce((r).locked_until, (r).doubt_since);

-- The effect deadline: by then the service has certainly committed or given up.
CREATE FUNCTION :"schema".effect_end(r :"schema".idempotency_record) RETURNS timestamptz LANGUAGE sql STABLE RETURN
  :"schema".open_since(r) + (r).effect_ms * interval '1 ms';

-- Free for any request, as if it had never been. Claim and janitor use this same predicate: an open outcome under
-- `probe` or `block` outlives the retention.
CREATE FUNCTION :"schema".forgotten(r :"schema".idempotency_record, t timestamptz) RETURNS boolean LANGUAGE sql STABLE RETURN
  (r).expires_at <= t AND ((r).state IN ('completed', 'released')
    OR ((r).on_in_doubt = 'run_again' AND :"schema".is_open(r, t) AND :"schema".effect_end(r) <= t));

-- When a record of open outcome may be claimed again, NULL: never by itself. `asked` is the request's on_in_doubt: the
-- stricter counts. `max_attempts`: executions in a row of open outcome, beyond which it is as `block`. `calm_from`: the
-- asker has had undisturbed contact with this database since then (NULL: always), and owes each holder one lease from
-- there. `probe` may claim as soon as the lease is over, to ask; `run_again` only after the effect deadline.
CREATE FUNCTION :"schema".runs_again_at(
  r :"schema".idempotency_record, asked :"schema".on_in_doubt, max_attempts int, calm_from timestamptz
) RETURNS timestamptz LANGUAGE sql STABLE RETURN
  CASE
    WHEN greatest((r).on_in_doubt, asked) = 'block' OR (r).reruns + 1 >= max_attempts THEN NULL
    ELSE greatest(
      :"schema".lease_end(r),
      CASE WHEN greatest((r).on_in_doubt, asked) = 'probe' THEN :"schema".open_since(r) ELSE :"schema".effect_end(r) END,
      calm_from + (r).lease_ms * interval '1 ms')
    END;

-- May this claim have the record? Its own lease, always. Else, unless it was abandoned or ended under this very claim
-- id: a forgotten one, a released one that binds nobody, and with the same fingerprint a released or open one.
CREATE FUNCTION :"schema".takeable(
  r :"schema".idempotency_record, claim uuid, fingerprint bytea, recipe int, asked :"schema".on_in_doubt,
  max_attempts int, calm_from timestamptz, t timestamptz
) RETURNS boolean LANGUAGE sql STABLE RETURN
  CASE
    WHEN (r).claim = claim THEN (r).state = 'in_progress'
    WHEN :"schema".forgotten(r, t) THEN true
    WHEN (r).state = 'released' AND NOT (r).bound THEN true
    WHEN (r).fingerprint <> fingerprint OR (r).recipe <> recipe THEN false
    WHEN (r).state = 'released' THEN true
    WHEN (r).state IN ('in_progress', 'in_doubt')
      THEN coalesce(:"schema".runs_again_at(r, asked, max_attempts, calm_from) <= t, false)
    ELSE false
    END;

-- The readable identity behind the digest. A difference is a fault, never a reason to execute.
CREATE FUNCTION :"schema".same_identity(
  r :"schema".idempotency_record, service text, operation text, scope text, key text
) RETURNS boolean LANGUAGE sql STABLE RETURN
  (r).key = key AND (r).scope = scope AND (r).operation = operation AND (r).service = service;

INSERT INTO :"schema".idempotency_schema (version, compatible_since) VALUES (1, 1);
