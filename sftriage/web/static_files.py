"""The page's own files: read once, and served by name. No path is ever made of what a request says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file. ``version`` changes with its content, so that browsers may keep it."""

    content: bytes
    media_type: str
    version: str


def load_static() -> dict[str, StaticFile]:
    """The files under ``static/`` of a known kind, by name."""
    found = {}
    for entry in files("sftriage.web").joinpath("static").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in MEDIA_TYPES:
            content = entry.read_bytes()
            found[entry.name] = StaticFile(content, MEDIA_TYPES[suffix], hashlib.sha256(content).hexdigest()[:12])
    return found
