"""Lists the licences of what `sftriage[all]` installs, in docs/licences.md: `make licences`.

Fails if a package names no licence, or one that is not in `ALLOWED`.
"""

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/licences.md"
ALLOWED = re.compile(
    r"(MIT(-0)?|ISC|0?BSD|[23]-Clause BSD|Apache|Python Software Foundation|PSF|Zlib|CC0"
    r"|MPL-2|Mozilla Public License 2)\b"
)
LIBRARIES = {"psycopg": "LGPL-3.0-only", "psycopg-binary": "LGPL-3.0-only"}
"""Weak copyleft, for packages that sftriage imports as they are and does not distribute."""
HEAD = """# Licences

What `pip install 'sftriage[all]'` installs besides sftriage (Apache-2.0), and with which extra; `make licences` makes
this list. Permissive licences and MPL-2.0 may be anything's dependency. psycopg (LGPL-3.0) is imported as it is, by the
extra `postgres` alone. PyTorch is your own.

| package | licence | comes with |
|---|---|---|
"""


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    for problem in problems():
        sys.stderr.write(f"licences: {problem}\n")
    return int(any(problems()))


def page() -> str:
    rows = (f"| {name} | {licence_of(name)} | {', '.join(extras)} |\n" for name, extras in packages().items())
    return HEAD + "".join(rows)


def problems() -> Iterator[str]:
    """What has to be looked into before a release."""
    for name in packages():
        found = licence_of(name)
        parts = re.split(r" AND | OR |; ", found)
        if LIBRARIES.get(name) != found and not all(ALLOWED.match(part.lstrip("(")) for part in parts):
            yield f"{name}: {found or 'names no licence'}"


def packages() -> dict[str, list[str]]:
    """The packages that are installed with sftriage, by name, and the extras that bring each; "" is sftriage itself."""
    extras = [
        extra for extra in metadata.metadata("sftriage").get_all("Provides-Extra") if extra not in ("all", "demo")
    ]
    found = defaultdict[str, list[str]](list)
    for extra in ("", *extras):
        for name in _closure("sftriage", extra, set()) - {"sftriage"}:
            found[name].append(extra or "sftriage")
    return {
        name: ["sftriage"] if "sftriage" in by else by
        for name, by in sorted(found.items(), key=lambda row: row[0].lower())
    }


def _closure(package: str, extra: str, known: set[tuple[str, str]]) -> set[str]:
    if (package, extra) in known:
        return set()
    known.add((package, extra))
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return set()
    names = {distribution.name}
    for text in distribution.requires or ():
        need = Requirement(text)
        if need.marker is None or need.marker.evaluate({"extra": extra}):
            for wanted in ("", *need.extras):
                names |= _closure(need.name, wanted, known)
    return names


def licence_of(package: str) -> str:
    """The licence that a package states: as an expression, by its classifiers, or as text."""
    about = metadata.metadata(package)
    listed = [name.split(" :: ")[-1] for name in about.get_all("Classifier") or () if name.startswith("License ::")]
    return about.get("License-Expression") or "; ".join(listed) or (about.get("License") or "").partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
