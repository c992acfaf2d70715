-- Bound the waits of the upkeep's transaction, so that it gives way to traffic and to readers.
-- No parameters. Result: nothing of use. Locks: none. Ends with the transaction: nothing leaks through a pooler.
-- datestyle: the bounds of partitions are read as text.
SELECT set_config('lock_timeout', '2s', true),
       set_config('statement_timeout', '30s', true),
       set_config('datestyle', 'ISO, YMD', true)
