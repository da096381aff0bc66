"""What is in a report, and what must not be in its export."""

import json
import sqlite3
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.base.children import Finished
from sftriage.capture.nsys_report import (
    REMOVED,
    ReportContents,
    check,
    complaint_of,
    contents_of,
    examine,
    is_environment,
    scrubbed,
)
from sftriage.errors import CaptureError
from tests.integration.capture.conftest import make_export

SECRET = "hunter2-hunter2"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("ProfilerStep#12", True),
        ("sftriage:backward", True),
        ("aten::linear", True),
        ("void kernel<a=1>(float*)", True),
        ("lr=0.1", True),
        ("tokenize the batch", True),
        ("token_embedding", True),
        ("num_tokens=4096", True),
        (f"AWS_SECRET_ACCESS_KEY={SECRET}", False),
        (f"HOME=/root\0API_KEY={SECRET}\0PATH=/bin", False),
        (f"python train.py --wandb-token={SECRET}", False),
        (f"python train.py --hf_token {SECRET} --steps 3", False),
        (f"curl -H 'Authorization: Bearer {SECRET}'", False),
        (f"postgresql://trainer:{SECRET}@db/runs", False),
        (f"password: {SECRET}", False),
    ],
)
def test_secrets_go_and_names_stay(text, kept):
    if kept:
        assert scrubbed(text) == text
    else:
        assert SECRET not in scrubbed(text)


NAMES = st.sampled_from(["token", "HF_TOKEN", "--api-key", "wandb_secret_id", "Password", "aws-access-key"])
SEPARATORS = st.sampled_from(["=", ": ", " = ", ":"])


@given(st.text(max_size=20), NAMES, SEPARATORS, st.text("abcXYZ019_-/+", min_size=8), st.sampled_from(["", " --lr 1"]))
def test_what_follows_the_name_of_a_secret_is_gone_whatever_stands_before(before, name, separator, secret, after):
    secret = f"s{secret}"
    assert secret not in scrubbed(f"{before} {name}{separator}{secret}{after}").replace(before, "")


@given(st.text())
def test_no_environment_is_left(text):
    assert not is_environment(scrubbed(text))


def test_an_export_is_counted_and_scrubbed_down_to_its_last_page(tmp_path):
    # GIVEN an export with environments and secrets in several tables
    path = tmp_path / "a.sqlite"
    environment = "\0".join(f"VARIABLE_{number}={SECRET}" for number in range(500))
    make_export(path, (3, 4, 5), kernels=7, gpus=1, texts=(environment, "aten::mm"))
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
        database.execute("INSERT INTO META_DATA_CAPTURE VALUES ('ENV', ?)", (f"lower={SECRET}",))
        database.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (name TEXT, nameEnum INTEGER, value TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('DeviceEnvironment', 610, ?)", (environment,))
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES ('CpuCores', 1, '2')")
    database.close()
    assert SECRET.encode() in path.read_bytes()
    # WHEN it is examined
    found = examine(path)
    # THEN what is in it is told
    assert found == ReportContents(steps=(3, 4, 5), events=10, kernels=7, gpus=1, environments=2)
    # AND nothing of the secrets is left in the file, not even in pages that are free
    assert SECRET.encode() not in path.read_bytes()
    with sqlite3.connect(path) as database:
        values = [value for (value,) in database.execute("SELECT value FROM StringIds")]
        assert values == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5", REMOVED, "aten::mm"]
        assert ("CpuCores", 1, "2") in database.execute("SELECT * FROM TARGET_INFO_SYSTEM_ENV").fetchall()
    database.close()


def test_what_is_no_text_in_an_export_is_kept_as_it_is(tmp_path):
    # GIVEN an export of a GPU host: among its texts are bytes that are none
    path, raw, environment = tmp_path / "a.sqlite", b"\n\xff\x01\b", b"HOME=/root\0NAME=\xff\xfe"
    make_export(path, (3,), kernels=1, gpus=1)
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE META_DATA_CAPTURE (name TEXT, value TEXT)")
        rows = [(value,) for value in (raw, environment)]
        database.executemany("INSERT INTO META_DATA_CAPTURE VALUES ('x', CAST(? AS TEXT))", rows)
    database.close()
    # WHEN it is examined THEN what is in it is told, they are what they were, and no environment is left
    found = examine(path)
    assert (found.steps, found.kernels, found.environments) == ((3,), 1, 1)
    with sqlite3.connect(path) as database:
        database.text_factory = bytes
        assert database.execute("SELECT value FROM META_DATA_CAPTURE").fetchall() == [(raw,), (REMOVED.encode(),)]
    database.close()


TOO_NEW = r"""**** Analysis failed with:
        Value: "/QuadD/TraceProcessEvent.cpp(45): Throw in function GetCudaCallbackName(bool)\nDynamic exception
type: boost::wrapexcept<InvalidArgumentException>\n[tag_message*] = Unknown runtime API function index: 440\n"
Saved report file to "b.nsys-rep"
"""


@pytest.mark.parametrize(
    ("output", "complaint"),
    [(TOO_NEW, "Unknown runtime API function index: 440"), ("", "exit status 3"), ("It failed.\n", "exit status 3")],
)
def test_an_importer_that_is_older_than_cuda_says_what_it_does_not_know(output, complaint):
    assert complaint_of(Finished(3, output)) == complaint
    # AND where the report lacks something, that is the reason
    with pytest.raises(CaptureError, match=r"no GPU kernel.*one as new as the job's CUDA can") as told:
        check(contents(kernels=0), (3,), ("cuda",), complaint)
    assert complaint in str(told.value)
    check(contents(), (3,), ("cuda",), complaint)


def test_a_range_that_never_ended_is_no_step(tmp_path):
    path = tmp_path / "a.sqlite"
    make_export(path, (3, 4))
    with sqlite3.connect(path) as database:
        database.execute("UPDATE NVTX_EVENTS SET end = NULL WHERE textId = 1")
    database.close()
    assert examine(path).steps == (3,)


@pytest.mark.parametrize("content", [None, b"", b"no database", b"SQLite format 3\0" + b"x" * 100])
def test_what_is_no_export_is_a_reason(tmp_path, content):
    path = tmp_path / "a.sqlite"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CaptureError):
        examine(path)


def contents(**changes):
    return ReportContents(**{"steps": (3, 4, 5), "events": 9, "kernels": 1, "gpus": 1, "environments": 0, **changes})


@pytest.mark.parametrize(
    ("found", "promised", "traces", "reason"),
    [
        (contents(), (3, 4, 5), ("nvtx", "cuda"), None),
        (contents(), (4,), ("nvtx",), None),
        (contents(steps=()), (), ("osrt",), None),
        (contents(kernels=0), (3,), ("nvtx",), None),
        (contents(kernels=0, gpus=0), (3,), ("nvtx", "cuda"), None),
        (contents(steps=(3, 5)), (3, 4, 5), ("nvtx",), "lacks the NVTX ranges of step 4$"),
        (contents(steps=()), (3, 4), ("nvtx",), "lacks the NVTX ranges of steps 3, 4$"),
        (contents(steps=(), events=0), (), ("osrt",), "no event at all"),
        (contents(kernels=0), (3,), ("nvtx", "cuda"), "no GPU kernel"),
    ],
)
def test_a_report_is_checked_against_what_was_promised(found, promised, traces, reason):
    if reason is None:
        check(found, promised, traces)
        return
    with pytest.raises(CaptureError, match=reason):
        check(found, promised, traces)


def test_the_program_prints_what_it_found_or_why_not(tmp_path):
    path = tmp_path / "a.sqlite"
    make_export(path, (3, 4))

    def run():
        command = [sys.executable, "-m", "sftriage.capture.nsys_report", path]
        return contents_of(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)

    assert run().steps == (3, 4)
    path.write_bytes(b"none")
    with pytest.raises(CaptureError, match="cannot be read"):
        run()


@pytest.mark.parametrize("said", ["", "Traceback", "{}", "[]", json.dumps({"steps": 1})])
def test_what_the_program_did_not_print_is_a_reason(said):
    with pytest.raises(CaptureError, match="could not be examined"):
        contents_of(said)
