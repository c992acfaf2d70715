-- Lift the timeouts that would end a transaction which idles while another connection works.
-- No parameters. Result: nothing of use. Locks: none. Ends with the transaction. PostgreSQL before 17 knows only one.
SELECT set_config(s.name, '0', true)
  FROM pg_settings AS s
 WHERE s.name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')
