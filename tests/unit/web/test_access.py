"""Who may read what listens: by which names it may be called, and whether the token is right."""

import base64

import pytest

from sftriage.errors import UsageError
from sftriage.web.access import Access, is_loopback, read_token

TOKEN = "0123456789abcdef"


def basic(password: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "")),
    ],
)
def test_what_only_this_machine_reaches_wants_no_token(host, loopback):
    assert is_loopback(host) is loopback
    if loopback:
        assert Access.to(host, None, "").token_sha256 is None
    else:
        with pytest.raises(UsageError, match="token"):
            Access.to(host, None, "")


@pytest.mark.parametrize(
    ("host", "header", "known"),
    [
        ("127.0.0.1", "127.0.0.1:9400", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "[::1]:80", True),
        ("127.0.0.1", "evil.example.org:9400", False),
        ("127.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "localhost:9400/../x", False),
        ("0.0.0.0", "10.0.0.1:80", True),
        ("0.0.0.0", "evil.example.org", False),
    ],
)
def test_a_name_that_somebody_elses_page_may_have_pointed_here_is_not_ours(host, header, known):
    assert Access.to(host, TOKEN, "").knows(header) is known


@pytest.mark.parametrize(
    ("authorization", "admitted"),
    [
        (f"Bearer {TOKEN}", True),
        (f"bearer   {TOKEN}", True),
        (basic(TOKEN), True),
        (f"Bearer {TOKEN}x", False),
        (f"Bearer {TOKEN[:-1]}", False),
        (f"Token {TOKEN}", False),
        (basic("wrong"), False),
        ("Basic !!!", False),
        (TOKEN, False),
        ("", False),
        ("Bearer \udcff\udcfe", False),
    ],
)
def test_only_the_token_admits(authorization, admitted):
    assert Access.to("127.0.0.1", TOKEN, "").admits(authorization) is admitted


def test_without_a_token_everybody_on_this_machine_is_admitted():
    assert Access.to("127.0.0.1", None, "").admits("")


def test_what_others_reach_wants_a_token_and_says_how_to_give_one():
    with pytest.raises(UsageError, match=r"0\.0\.0\.0 can be reached .*: give one with --a-file"):
        Access.to("0.0.0.0", None, "give one with --a-file")


@pytest.mark.parametrize("token", ["short", "", "x" * 15, "fifteen-letters", "0123456789abcdef\n", "0123456789abcdé0"])
def test_a_token_that_is_guessed_or_mistyped_is_none(token):
    with pytest.raises(UsageError, match="at least 16 printable ASCII"):
        Access.to("127.0.0.1", token, "")


def test_a_token_is_read_from_its_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    assert read_token(path) == TOKEN
    path.write_bytes(b"\xff" * 20)
    with pytest.raises(UsageError, match="printable ASCII"):
        read_token(path)
    with pytest.raises(UsageError, match="No such file"):
        read_token(tmp_path / "none")
