"""Files appear whole or not at all, are private, and are opened without following links; a note holds one value."""

import os
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from sftriage.base.files import MODE_ENV, Note, open_regular, regular, replacing, write_atomically
from sftriage.errors import CaptureError, InputError


@pytest.mark.parametrize("content", ["new", b"new"])
def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path, content):
    write_atomically(tmp_path / "a.json", "old")
    write_atomically(tmp_path / "a.json", content)
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_a_file_that_fails_leaves_the_old_content(tmp_path):
    write_atomically(tmp_path / "a.json", "old")
    with pytest.raises(TypeError), replacing(tmp_path / "a.json") as file:
        file.write("no bytes")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


@pytest.mark.parametrize(
    ("mode", "environment", "found"),
    [(0o600, "0644", 0o600), (None, "0644", 0o644), (None, None, 0o600), (0o666, None, 0o640)],
)
def test_a_file_has_the_mode_that_is_wanted(tmp_path, monkeypatch, mode, environment, found):
    if environment is not None:
        monkeypatch.setenv(MODE_ENV, environment)
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.json", "", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == found


@pytest.mark.parametrize("error_type", [InputError, CaptureError])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory", "missing"])
def test_a_file_that_is_not_regular_is_refused(tmp_path, kind, error_type):
    path = tmp_path / "a.json"
    (tmp_path / "b.json").write_text("elsewhere")
    make = {
        "link": lambda: path.symlink_to(tmp_path / "b.json"),
        "pipe": lambda: os.mkfifo(path),
        "directory": path.mkdir,
        "missing": lambda: None,
    }
    make[kind]()
    with pytest.raises(error_type, match=r"a\.json: "):
        open_regular(path, error_type)


def test_a_regular_file_is_read(tmp_path):
    write_atomically(tmp_path / "a.json", "content")
    with regular(tmp_path / "a.json", InputError) as file:
        assert file.read() == b"content"


@dataclass(frozen=True, slots=True)
class Place:
    path: Path
    names: tuple[str, ...] = ()
    number: int | None = None


def test_a_saved_value_is_loaded(tmp_path):
    note = Note(tmp_path / "place.json", Place)
    assert note.load() is None
    for value in (Place(tmp_path, ("a", "b")), Place(Path(), number=3)):
        note.save(value)
        assert note.load() == note.get() == value


@pytest.mark.parametrize("content", ["", "12", "{}", '{"path": 3}', '{"path": "a", "number": "b"}', "\0" * 200])
def test_a_file_with_another_content_is_refused(tmp_path, content):
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
