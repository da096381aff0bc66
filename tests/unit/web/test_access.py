"""What may listen where, and what may be a token."""

import pytest

from sftriage.errors import UsageError
from sftriage.web.access import Access, is_loopback, token_of


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
    monkeypatch.setenv("SOME_TOKEN", "fedcba9876543210")
    assert token_of(tmp_path / "token", "SOME_TOKEN") == "0123456789abcdef"
    assert token_of(None, "SOME_TOKEN") == "fedcba9876543210"
    assert token_of(None, "NO_TOKEN") is None


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "fifteen-letters", "0123456789abcdef\n", "0123456789abcdé0"])
def test_a_token_that_is_guessed_or_mistyped_is_none(token):
    with pytest.raises(UsageError, match="at least 16 printable ASCII"):
        Access.to("127.0.0.1", token, "")
