"""Paths as people say them."""

from __future__ import annotations

from pathlib import Path


def place(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
