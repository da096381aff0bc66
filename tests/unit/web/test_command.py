"""`sftriage ui` before it listens: who is let in is settled by then."""

import socket
import sys

import pytest

from sftriage.commands import main


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run the command with arguments that it refuses; what it says."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("SFTRIAGE_UI_TOKEN", raising=False)

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["sftriage", "ui", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        assert caught.value.code == 2
        return capsys.readouterr().err

    return call


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_a_page_for_others_wants_a_token(refused, run, host):
    assert "a token is wanted" in refused("--run", run.directory.path, "--host", host)


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"", "at least 16"), (b"short\n", "at least 16"), (b"\xff" * 20, "printable ASCII")],
)
def test_a_token_file_has_to_hold_a_token(refused, run, tmp_path, content, said):
    if content is not None:
        (tmp_path / "token").write_bytes(content)
        (tmp_path / "token").chmod(0o600)
    assert said in refused("--run", run.directory.path, "--token-file", tmp_path / "token")


def test_an_easy_token_from_the_environment_is_refused_and_not_repeated(refused, run, monkeypatch):
    monkeypatch.setenv("SFTRIAGE_UI_TOKEN", "hunter2")
    said = refused("--run", run.directory.path, "--host", "0.0.0.0")
    assert "at least 16" in said
    assert "hunter2" not in said


def test_a_run_that_is_a_file(refused, tmp_path):
    (tmp_path / "file").touch()
    assert "not a directory" in refused("--run", tmp_path / "file")


def test_a_port_that_is_taken(refused, run):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port}" in refused("--run", run.directory.path, "--port", port)
