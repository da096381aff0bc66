"""A sftriage whose catalogue has one more column."""

import shutil
from pathlib import Path

import pytest

from sftriage.traces import migrations

STEP = '''"""A note."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("sftriage_captures", sa.Column("note", sa.Text))
'''


def a_newer_sftriage(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have the next version's steps in place of ours."""
    shutil.copytree(Path(migrations.__file__).parent, folder)
    (folder / "versions" / "v0002_note.py").write_text(STEP)
    patch.setattr(migrations, "_HERE", folder)
    patch.setattr(migrations, "HEAD", "0002")
