"""Captures of many stores, and which stores are indexed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_TEXT = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "sftriage_captures",
        sa.Column("key", _TEXT, primary_key=True),
        sa.Column("capture_id", _TEXT, nullable=False),
        sa.Column("job", _TEXT, nullable=False),
        sa.Column("run", _TEXT, nullable=False),
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("stage", _TEXT),
        sa.Column("label", _TEXT, nullable=False),
        sa.Column("scope", _TEXT, nullable=False),
        sa.Column("window_first_step", sa.BigInteger, nullable=False),
        sa.Column("window_last_step", sa.BigInteger, nullable=False),
        sa.Column("first_step", sa.BigInteger, nullable=False),
        sa.Column("last_step", sa.BigInteger, nullable=False),
        sa.Column("gain_s", sa.Double, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", _TEXT, nullable=False),
        sa.Column("profiler", _TEXT, nullable=False),
        sa.Column("rule", _TEXT, nullable=False),
        sa.Column("policy", _TEXT, nullable=False),
        sa.Column("why", _TEXT, nullable=False),
        sa.Column("created_at", _TEXT, nullable=False),
        sa.Column("host", _TEXT, nullable=False),
        sa.Column("reproduced", _TEXT),
        sa.Column("store", _TEXT, nullable=False),
        sa.Column("reference", _TEXT, nullable=False),
    )
    op.create_index("ix_sftriage_captures_created_at", "sftriage_captures", ["created_at"])
    op.create_table(
        "sftriage_stores",
        sa.Column("key", _TEXT, primary_key=True),
        sa.Column("store", _TEXT, nullable=False),
    )
