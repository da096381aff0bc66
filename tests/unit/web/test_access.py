"""What may listen where, and what may be a token."""

import pytest

from sftriage.errors import UsageError
from sftriage.web.access import Access, is_loopback


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


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "fifteen-letters", "0123456789abcdef\n", "0123456789abcdé0"])
def test_a_token_that_is_guessed_or_mistyped_is_none(token):
    with pytest.raises(UsageError, match="at least 16 printable ASCII"):
        Access.to("127.0.0.1", token, "")
