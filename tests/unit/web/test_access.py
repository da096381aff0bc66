"""What may listen where, what may be a token, and that `sftriage ui` settles this before it listens."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sftriage.commands import main
from sftriage.errors import UsageError
from sftriage.web import serving
from sftriage.web.serving import Access, is_loopback, token_of


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")),
    ],
)
def test_what_only_this_machine_reaches_wants_no_token_and_all_else_says_how_to_give_one(host, loopback):
    assert is_loopback(host) is loopback
    if loopback:
        assert Access.to(host, None, "").admits("")
    else:
        with pytest.raises(UsageError, match=f"{host} can be reached .*: give one with --a-file"):
            Access.to(host, None, "give one with --a-file")


def test_a_token_is_in_a_file_or_else_in_the_environment(tmp_path, monkeypatch):
    (tmp_path / "token").write_text("0123456789abcdef\n")
    (tmp_path / "token").chmod(0o600)
    monkeypatch.setenv("SOME_TOKEN", "fedcba9876543210")
    assert token_of(tmp_path / "token", "SOME_TOKEN") == "0123456789abcdef"
    assert token_of(None, "SOME_TOKEN") == "fedcba9876543210"
    assert token_of(None, "NO_TOKEN") is None


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "fifteen-letters", "0123456789abcdef\n", "0123456789abcdé0"])
def test_a_token_that_is_guessed_or_mistyped_is_none(token):
    with pytest.raises(UsageError, match="at least 16 printable ASCII"):
        Access.to("127.0.0.1", token, "")


@pytest.fixture
def token(tmp_path):
    """A token file that is its owner's alone."""
    path = tmp_path / "a token"
    path.write_text("0123456789abcdef\n")
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o700])
def test_a_token_file_of_ones_own_is_taken(token, mode):
    token.chmod(mode)
    assert token_of(token, "") == "0123456789abcdef"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o602, 0o601, 0o666])
def test_a_token_file_that_others_can_use_is_refused_with_what_mends_it(token, mode):
    token.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}") as caught:
        token_of(token, "")
    # WHEN a person does what they are told THEN it is taken
    subprocess.run(str(caught.value).rpartition(": ")[2], shell=True, check=True)
    assert token_of(token, "") == "0123456789abcdef"


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_token_file_that_others_can_put_another_in_the_place_of(token, mode):
    token.parent.chmod(mode)
    with pytest.raises(UsageError, match="others can put another token in its place") as caught:
        token_of(token, "")
    subprocess.run(str(caught.value).rpartition(": ")[2], shell=True, check=True)
    assert token_of(token, "") == "0123456789abcdef"


def test_in_a_directory_such_as_tmp_nobody_can(token):
    token.parent.chmod(0o1777)
    assert token_of(token, "") == "0123456789abcdef"


def test_a_link_is_as_good_as_where_it_leads(token, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "token").write_text("0123456789abcdef\n")
    (tmp_path / "open" / "token").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "open" / "token")
    with pytest.raises(UsageError, match="others can put another token in its place"):
        token_of(tmp_path / "link", "")


def test_a_token_may_come_through_a_pipe():
    reads, writes = os.pipe()
    os.write(writes, b"0123456789abcdef\n")
    os.close(writes)
    assert token_of(Path(f"/dev/fd/{reads}"), "") == "0123456789abcdef"
    os.close(reads)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
class TestOfAnotherUser:
    def test_the_token_of_another_user_is_refused(self, token):
        os.chown(token, 4321, -1)
        with pytest.raises(UsageError, match="belongs to another user"):
            token_of(token, "")

    def test_so_is_one_in_the_directory_of_another(self, token):
        os.chown(token.parent, 4321, -1)
        with pytest.raises(UsageError, match="keep it elsewhere"):
            token_of(token, "")

    @pytest.mark.parametrize(("mode", "warned"), [(0o440, False), (0o644, True)])
    def test_one_that_root_shares_is_taken(self, token, mode, warned, caplog, monkeypatch):
        # GIVEN a secret as it is mounted into a pod: root's, and read by its group, or by everybody
        token.chmod(mode)
        monkeypatch.setattr(serving.os, "getuid", lambda: 4321)
        # THEN it is taken, with a warning if everybody can read it
        assert token_of(token, "") == "0123456789abcdef"
        assert ("chmod o-r" in caplog.text) is warned


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
