"""A note holds one value, or is missing."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sftriage.base.notes import Note
from sftriage.errors import InputError


@dataclass(frozen=True, slots=True)
class Place:
    path: Path
    names: tuple[str, ...] = ()
    number: int | None = None


def test_a_value_is_found_again(tmp_path):
    note = Note(tmp_path / "place.json", Place)
    assert note.load() is None
    for value in (Place(tmp_path, ("a", "b")), Place(Path(), number=3)):
        note.save(value)
        assert note.load() == note.get() == value


@pytest.mark.parametrize("content", ["", "12", "{}", '{"path": 3}', '{"path": "a", "number": "b"}', "\0" * 200])
def test_what_is_no_such_value_is_refused(tmp_path, content):
    note = Note(tmp_path / "place.json", Place)
    note.path.write_text(content)
    with pytest.raises(InputError, match=r"place\.json: "):
        note.load()
    assert note.get() is None


def test_a_link_is_not_followed(tmp_path):
    Note(tmp_path / "elsewhere", Place).save(Place(tmp_path))
    (tmp_path / "place.json").symlink_to(tmp_path / "elsewhere")
    assert Note(tmp_path / "place.json", Place).get() is None


def test_a_trainer_that_imports_base_needs_the_standard_library_alone():
    modules = ", ".join(f"sftriage.base.{path.stem}" for path in Path("sftriage/base").glob("[!_]*.py"))
    needed = f"import sys, {modules}; sys.exit(len({{'numpy', 'pydantic', 'msgspec'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", needed], env=os.environ, check=False).returncode == 0
