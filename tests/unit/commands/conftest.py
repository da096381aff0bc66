"""The command line, called in this process as the `sftriage` script calls it."""

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from sftriage.commands import main


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def sftriage(monkeypatch, capsys, tmp_path) -> Callable[..., Outcome]:
    """Run a command; its exit code and what it wrote. Its home is its own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")

    def call(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["sftriage", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        written = capsys.readouterr()
        return Outcome(caught.value.code or 0, written.out, written.err)

    return call
