"""The webhook's own certificate: when there is another, and who is trusted meanwhile."""

from __future__ import annotations

import ssl
from datetime import datetime, timedelta, timezone

import pytest

from sftriage.kube.webhook import Wanted, good_until, issued, service_names, wanted

NOW = datetime(2027, 1, 15, tzinfo=timezone.utc)
NAMES = service_names("sftriage-webhook", "sftriage-system")
GOOD = issued(NAMES, NOW)
OLD = issued(NAMES, NOW - timedelta(days=310))


def test_a_certificate_is_good_for_the_names_of_its_service_and_for_a_year():
    assert NAMES[0] == "sftriage-webhook.sftriage-system.svc"
    assert good_until(GOOD.files(), NAMES) == NOW + timedelta(days=365)
    assert good_until(GOOD.files(), ("another.ns.svc",)) is None
    assert good_until(issued(["127.0.0.1"], NOW).files(), ["127.0.0.1"]) is not None


def test_a_client_takes_it(tmp_path):
    for name, content in GOOD.files().items():
        (tmp_path / name).write_bytes(content)
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    ssl.create_default_context(cadata=GOOD.authority.decode())


OTHER = issued(NAMES, NOW)
BAD = {
    "nothing": {},
    "no key": {name: one for name, one in GOOD.files().items() if name != "tls.key"},
    "another's key": {**GOOD.files(), "tls.key": OTHER.key},
    "another's authority": {**GOOD.files(), "ca.crt": OTHER.authority},
    "half of one": {**GOOD.files(), "tls.crt": GOOD.certificate[:100]},
}


@pytest.mark.parametrize("files", BAD.values(), ids=BAD)
def test_what_is_no_good_certificate_is_made_anew_and_alone_is_trusted(files):
    assert good_until(files, NAMES) is None
    found = wanted(files, b"whatever", NAMES, NOW)
    assert found.issued is not None
    assert found.trusted == found.issued.authority


def test_a_good_one_stays_and_is_trusted():
    assert wanted(GOOD.files(), GOOD.authority, NAMES, NOW) == Wanted(None, GOOD.authority)
    # AND where somebody has taken the trust away, it is trusted again
    assert wanted(GOOD.files(), b"", NAMES, NOW) == Wanted(None, GOOD.authority)


def test_one_that_ends_soon_is_replaced_and_both_are_trusted_meanwhile():
    found = wanted(OLD.files(), OLD.authority, NAMES, NOW)
    assert found.issued is not None
    assert found.trusted == found.issued.authority + OLD.authority
    # WHEN it is looked at again THEN nothing is done
    assert wanted(found.issued.files(), found.trusted, NAMES, NOW) == Wanted(None, found.trusted)
