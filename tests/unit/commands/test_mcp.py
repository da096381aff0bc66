"""`sftriage mcp`: what is said before anything is served."""

import sys

import pytest


@pytest.mark.parametrize("runs", ["missing", "file"])
def test_a_place_that_is_none_is_said(sftriage, tmp_path, runs):
    (tmp_path / "file").write_text("")
    assert "no such directory; --runs names" in sftriage("mcp", "--runs", tmp_path / runs).refusal


def test_without_the_sdk_it_is_said_what_to_install(sftriage, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "sftriage.assistants.server", raising=False)
    # (what another test has imported of it is there under its own name)
    for name in ("mcp", *(name for name in sys.modules if name.startswith("mcp."))):
        monkeypatch.setitem(sys.modules, name, None)
    assert "install sftriage[mcp]" in sftriage("mcp", "--runs", tmp_path).refusal
