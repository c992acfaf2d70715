"""The lease protocol with PostgreSQL: statements in `queries/`, the schema in `migrations/`, a lane for each kind.

Knows nothing of HTTP, policies or metrics. Nothing of asyncpg is seen outside.
"""

from gateway.store.link import StoreState
from gateway.store.migrate import MigrationStatus, migrate, script, status
from gateway.store.observer import StoreObserver
from gateway.store.postgres import PostgresStore

__all__ = ["MigrationStatus", "PostgresStore", "StoreObserver", "StoreState", "migrate", "script", "status"]
