"""What alembic runs: the steps that are missing, on the connection and in the transaction of who asked for them."""

from __future__ import annotations

from alembic import context

from sftriage.traces.migrations import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
