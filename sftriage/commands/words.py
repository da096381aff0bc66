"""Paths and sizes as people say them."""

from __future__ import annotations

from pathlib import Path


def place(path: Path) -> str:
    """A path as one would type it here: relative where that is shorter."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def size(size_bytes: float) -> str:
    """A file's size, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"
