"""The catalogue's schema, and how an older one becomes the newest.

Each step is a file in ``versions/``, with a number for its name. A step that adds what only manifests know empties
``sftriage_stores``: every store is then indexed again when it is next asked about.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, column, inspect, select, table

HEAD = "0001"
"""The newest step."""

VERSION_TABLE = "sftriage_schema"

_HERE = Path(__file__).parent


class Unfit(Exception):  # noqa: N818  # not an error by itself: whoever knows the database's name says it
    """The database has a schema that this sftriage does not know; the message says what to do."""


def is_current(connection: Connection) -> bool:
    """Whether the database has the newest schema.

    Raises:
        Unfit: it has one that is newer still.
    """
    if not inspect(connection).has_table(VERSION_TABLE):
        return False
    found = connection.execute(select(column("version_num")).select_from(table(VERSION_TABLE))).scalar()
    if found is not None and str(found) > HEAD:
        raise Unfit(
            f"written by a newer sftriage (schema {found}; this one knows up to {HEAD}): upgrade sftriage, or name "
            "another catalogue"
        )
    return found == HEAD


def upgrade(connection: Connection) -> None:
    """Bring the database to the newest schema, in the transaction that is under way. A current one is left alone.

    Raises:
        Unfit: it has a schema that this sftriage does not know.
    """
    if is_current(connection):
        return
    # Imported where it is needed, which is once in the life of a catalogue.
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_HERE).replace("%", "%%"))
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise Unfit(f"no schema that this sftriage knows: {error}") from error
