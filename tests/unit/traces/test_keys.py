"""Names of jobs and runs as parts of keys: readable, reversible, and never a way out."""

from __future__ import annotations

import re
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sftriage.errors import InputError, UsageError
from sftriage.traces.manifest import CONTROL
from sftriage.traces.remote import checked_url, message_of
from sftriage.traces.stores import MAX_PART_BYTES, CaptureKey, read, written

SAFE = re.compile(r"[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*")


PARTS = {
    "resnet-50_v1.5": "resnet-50_v1.5",
    "a b": "a%20b",
    "team/job": "team%2Fjob",
    "..": "%2E.",
    ".": "%2E",
    ".hidden": "%2Ehidden",
    "100%": "100%25",
    "%2E.": "%252E.",
    "größe": "gr%C3%B6%C3%9Fe",
    "a\\b\x00\n": "a%5Cb%00%0A",
}


@pytest.mark.parametrize(("name", "part"), PARTS.items())
def test_a_name_is_written_so_that_it_is_one_plain_part(name, part):
    assert (written(name), read(part)) == (part, name)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40))
@settings(deadline=None)
def test_any_name_comes_back_and_its_part_is_plain(name):
    if len(quote(name, safe="")) > MAX_PART_BYTES - 2:
        return
    part = written(name)
    assert read(part) == name
    assert SAFE.fullmatch(part)
    assert len(part) <= MAX_PART_BYTES


@given(st.text(max_size=60) | st.from_regex(r"[a-z%./]{0,12}/[a-zA-Z%0-9.]{0,9}/[a-z.0-9-]{0,9}", fullmatch=True))
@settings(deadline=None)
def test_whatever_a_key_is_it_is_a_place_that_we_would_write_or_refused(key):
    try:
        place = CaptureKey.parse(key)
    except InputError as error:
        said = str(error)
    else:
        said = place.key
        assert said == key
    assert not CONTROL.search(said)


@pytest.mark.parametrize("name", ["", "x" * 241, "ä" * 41, "\udcff"])
def test_a_name_that_cannot_be_part_of_a_key_is_refused(name):
    with pytest.raises(UsageError):
        written(name)


# (`%6F` is another way to write an o, as a small f in `%2f` is)
FORGED = (
    "job/run job/run/c-1/more ../run/c-1 job/../c-1 job/run/.. job/run/.c-1 job//c-1 /run/c-1 job/run/ "
    "j%6Fb/run/c-1 j%2fb/run/c-1 j%ffb/run/c-1 job%/run/c-1"
)


@pytest.mark.parametrize("key", [*FORGED.split(), "a b/run/c-1"])
def test_a_forged_key_is_no_place(key):
    with pytest.raises(InputError):
        CaptureKey.parse(key)


@pytest.mark.parametrize(
    ("given_url", "url"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/some/prefix/", "s3://bucket/some/prefix"),
        ("gs://bucket/p", "gs://bucket/p"),
        ("az://container/p", "az://container/p"),
        ("s3://bucket/a b/%63", "s3://bucket/a%20b/c"),
        ("file:///mnt/traces", "file:///mnt/traces"),
        ("/mnt/traces", "file:///mnt/traces"),
        ("/mnt/our traces", "file:///mnt/our%20traces"),
    ],
)
def test_a_stores_url_is_written_in_one_way(given_url, url):
    assert checked_url(given_url) == url
    assert checked_url(url) == url


NO_STORES = "http://host/x memory:/// s3:// s3:///prefix file:/// file://host/dir s3://bucket/../other"


@pytest.mark.parametrize(
    "url", ["", *NO_STORES.split(), "s3://bucket/%2E%2E/other", "s3://bucket/a\nb", "s3://bucket/a%1b%5B31m"]
)
def test_what_is_no_store_is_refused_in_one_printable_line(url):
    with pytest.raises(UsageError) as refused:
        checked_url(url)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("url", ["s3://key:SECRET@bucket/p", "az://c/p?sig=SECRET", "gs://b/p#SECRET"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    with pytest.raises(UsageError, match="environment") as refused:
        checked_url(url)
    assert "SECRET" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Generic S3 error: no\n\nDebug source:\nGeneric {", "Generic S3 error: no"),
        ("GET https://a.example/c?sv=1&sig=SECRET in 4 ms - refused", "GET https://a.example/c in 4 ms - refused"),
        ("404: <?xml version='1.0'?>\n<Error><Message>No such bucket</Message></Error>", "404: No such bucket"),
        ("GET http://169.254.169.254/x - 403", "no credentials in the environment, and none of this machine: GET"),
        ("", "Exception"),
        ("a\x1b[31mb", "a?[31mb"),
    ],
)
def test_what_a_store_says_is_one_line_without_secrets(text, line):
    answer = message_of(Exception(text))
    assert answer.startswith(line)
    assert "SECRET" not in answer
    assert len(answer) <= 300
