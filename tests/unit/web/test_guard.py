import base64

import pytest

from sftriage.web.run_page import RunPage
from sftriage.web.serving import HEADERS, Access
from tests.unit.web.asking import ask

TOKEN = "correct-horse-battery-staple"


def basic(password: str, user: str = "me") -> tuple[str, str]:
    return "authorization", "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.fixture
def guarded(run):
    return RunPage(run.source, Access.to("10.1.2.3", TOKEN, "", ["Triage.example.org"])).app


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "BREW"])
@pytest.mark.parametrize("target", ["/", "/captures/c-1", "/static/page.css", "/nowhere"])
def test_nothing_but_reading_is_answered(run, method, target):
    answer = run.get(target, method=method)
    assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8080", 200),
        ("localhost:1", 200),
        ("LocalHost", 200),
        ("[::1]:8080", 200),
        ("evil.example.org", 421),
        ("evil.example.org:8080", 421),
        ("127.0.0.1.evil.example.org", 421),
        ("localhost.evil.example.org", 421),
        ("localhost@evil.example.org", 421),
        ("localhost:8080/", 421),
        ("localhost:9400/../x", 421),
        ("10.0.0.1", 421),
        ("", 421),
        ("localhost\x00", 421),
    ],
)
def test_a_name_that_was_made_to_point_here_is_refused(run, host, status):
    assert run.get("/", headers=[("host", host)]).status == status


@pytest.mark.parametrize("headers", [[], [("host", "localhost"), ("host", "evil.example.org")]])
def test_a_request_names_one_host(run, headers):
    assert run.get("/", headers=headers).status == 421


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("triage.example.org", 200),
        ("TRIAGE.example.org:443", 200),
        ("10.1.2.3:8080", 200),
        # An address is nobody's to point elsewhere.
        ("192.168.0.7", 200),
        ("[fe80::1]", 200),
        ("evil.example.org", 421),
        ("localhost", 421),
    ],
)
def test_a_page_for_others_goes_by_its_names_and_by_addresses(guarded, host, status):
    assert ask(guarded, "/", headers=[("host", host), basic(TOKEN)]).status == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (None, 401),
        (basic(TOKEN), 200),
        (basic(TOKEN, user=""), 200),
        (("authorization", f"Bearer {TOKEN}"), 200),
        (("authorization", f"bearer   {TOKEN}"), 200),
        (basic(TOKEN[:-1]), 401),
        (basic(TOKEN + "x"), 401),
        (basic(""), 401),
        (("authorization", f"Bearer {TOKEN}x"), 401),
        (("authorization", "Bearer \xff\xfe"), 401),
        (("authorization", f"Digest {TOKEN}"), 401),
        (("authorization", TOKEN), 401),
        (("authorization", "Basic !!!"), 401),
        (("authorization", "Basic /w=="), 401),
        (("authorization", ""), 401),
    ],
)
@pytest.mark.parametrize("target", ["/", "/events", "/static/page.css", "/captures/x/files/y", "/nowhere"])
def test_without_the_token_there_is_nothing_to_be_seen(guarded, target, authorization, status):
    headers = [("host", "10.1.2.3"), *([authorization] if authorization else [])]
    # (an event stream does not end: its headers will do)
    answer = ask(guarded, target, headers=headers, method="HEAD" if target == "/events" else "GET")
    if status == 401:
        assert (answer.status, answer.headers["www-authenticate"][:5]) == (401, "Basic")
        assert TOKEN.encode() not in answer.body
    else:
        assert answer.status in (200, 404)


def test_a_token_in_an_address_is_no_token(guarded):
    assert ask(guarded, f"/?token={TOKEN}", headers=[("host", "10.1.2.3")]).status == 401


def test_two_tokens_are_none(guarded):
    headers = [("host", "10.1.2.3"), basic(TOKEN), basic(TOKEN)]
    assert ask(guarded, "/", headers=headers).status == 401


def test_the_token_is_compared_in_constant_time(guarded, monkeypatch):
    # GIVEN a look at what is compared
    seen = []
    monkeypatch.setattr(
        "sftriage.web.serving.hmac.compare_digest", lambda one, other: seen.append((one, other)) or False
    )
    # WHEN tokens of any length come THEN digests of one length are compared, by the one comparison there is
    for password in ("", "x", TOKEN, "y" * 10_000):
        assert ask(guarded, "/", headers=[("host", "10.1.2.3"), basic(password)]).status == 401
    assert len(seen) == 4
    assert {(len(one), len(other)) for one, other in seen} == {(32, 32)}


@pytest.mark.parametrize("host", ["localhost", "evil.example.org"])
@pytest.mark.parametrize("target", ["/", "/nowhere", "/static/page.css", "/captures/x", "/heat.bin"])
def test_every_answer_keeps_the_page_in_its_place_and_every_refusal(run, target, host):
    answer = run.get(target, headers=[("host", host)])
    for name, value in HEADERS.items():
        if name != "Cache-Control":
            assert answer.headers[name.lower()] == value
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
