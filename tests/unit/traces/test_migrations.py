"""Older schemas become the newest, and newer ones are refused."""

import shutil
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from sftriage.errors import UsageError
from sftriage.traces import migrations
from sftriage.traces.catalogue import Catalogue
from sftriage.traces.rows import METADATA
from tests.unit.traces.newer import a_newer_sftriage


def test_the_newest_schema_is_the_last_step():
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_heads() == [migrations.HEAD]


def test_the_steps_make_the_tables_that_are_asked(tmp_path, store):
    store.sweep()
    (tmp_path / "run").mkdir()
    Catalogue(tmp_path / "catalogue.db", store).find()
    with sa.create_engine(f"sqlite:///{tmp_path / 'catalogue.db'}").connect() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": migrations.VERSION_TABLE})
        assert compare_metadata(context, METADATA) == []


def test_an_older_catalogue_is_brought_up_to_date_and_a_newer_one_is_refused(tmp_path, store, put, monkeypatch):
    path = tmp_path / "catalogue.db"
    # GIVEN a catalogue with a capture that the store has no more, so that building it again would lose it
    catalogue = Catalogue(path, store)
    put("a")
    assert len(catalogue.find()) == 1
    store.remove("a")
    # WHEN a newer sftriage asks it THEN it has the newer schema, and what it had
    with monkeypatch.context() as context:
        a_newer_sftriage(context, tmp_path / "newer")
        assert len(catalogue.find()) == 1
        assert len(Catalogue(path, store).find()) == 1
    with sa.create_engine(f"sqlite:///{path}").connect() as connection:
        assert "note" in [column["name"] for column in sa.inspect(connection).get_columns("sftriage_captures")]
    # AND this one refuses it in words, and leaves it alone
    with pytest.raises(UsageError, match=r"catalogue\.db: written by a newer sftriage \(schema 0002; .* up to 0001\)"):
        catalogue.find()
    assert not path.with_name("catalogue.db.damaged").exists()


def test_a_schema_of_nobody_is_no_catalogue(tmp_path, store, put):
    path = tmp_path / "catalogue.db"
    catalogue = Catalogue(path, store)
    put("a")
    catalogue.find()
    with sa.create_engine(f"sqlite:///{path}").begin() as connection:
        connection.execute(sa.text("UPDATE sftriage_schema SET version_num = '0000'"))
    with pytest.raises(UsageError, match="no schema that this sftriage knows"):
        catalogue.find()


def test_a_folder_with_a_percent_sign_in_its_name_does_not_matter(tmp_path, store, put, monkeypatch):
    here = tmp_path / "100%(here)s"
    shutil.copytree(Path(migrations.__file__).parent, here)
    monkeypatch.setattr(migrations, "_HERE", here)
    put("a")
    assert len(Catalogue(tmp_path / "catalogue.db", store).find()) == 1
