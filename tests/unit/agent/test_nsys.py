"""The output and flags of nsys, the start of a rank under it, and what must not be in its reports."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sftriage.agent import nsys_rank
from sftriage.agent.nsys import parse_version, report_of, session_of, start_flags
from sftriage.agent.nsys_rank import bare_environment, nsys_command, trainer_command, trainer_environment
from sftriage.agent.nsys_report import (
    REMOVED,
    ReportContents,
    check,
    complaint_of,
    contents_of,
    examine,
    is_environment,
    scrubbed,
)
from sftriage.base.process import Finished
from sftriage.errors import CaptureError
from tests.integration.test_nsys_failing import make_export


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, ("--sample=none", "--cpuctxsw=none")),
        ({"sample": "none", "sqlite": True, "trace": ["nvtx"]}, ("--sample=none", "--cpuctxsw=none")),
        ({"sample": "cpu"}, ("--sample=process-tree", "--cpuctxsw=process-tree")),
    ],
)
def test_nothing_is_sampled_by_default(options, flags):
    assert start_flags(options) == flags


@pytest.mark.parametrize(
    ("names", "rank", "chosen"),
    [
        (["sft-a-0.0", "sft-a-1.0"], 1, "sft-a-1.0"),
        (["sft-a-1.0", "sft-a-11.0"], 1, "sft-a-1.0"),
        (["sft-a-1.2", "sft-a-1.10", "sft-a-1.9"], 1, "sft-a-1.10"),
        (["sft-ab-1.0", "sft-a-1.0", "a user's own session"], 1, "sft-a-1.0"),
        (["sft-b-1.0", "xsft-a-1.0", "sft-a-1"], 1, None),
        (["Connection refused"], 0, None),
        ([], 0, None),
    ],
)
def test_the_session_of_a_rank_is_that_of_its_newest_attempt(names, rank, chosen):
    lines = ["\n              ID         TIME                       STATE LAUNCH NAME"]
    lines += [f"         1025708        00:02             RangeCollection      1 {name}" for name in names]
    if chosen is not None:
        assert session_of("\n".join(lines), "sft-a", rank) == (chosen, "RangeCollection")
        return
    with pytest.raises(CaptureError, match=rf"rank {rank} has no nsys session"):
        session_of("\n".join(lines), "sft-a", rank)


@pytest.mark.parametrize(
    ("parse", "text", "found"),
    [
        (parse_version, "NVIDIA Nsight Systems version 2022.4.2.1-df9881f\n", (2022, 4, 2)),
        (parse_version, "NVIDIA Nsight Systems version 2025.3.2.474-253236389321v0", (2025, 3, 2)),
        (parse_version, "NVIDIA Nsight Systems version 2021.4.1.73-08591f7", (2021, 4, 1)),
        (parse_version, "warning: something\nNVIDIA Nsight Systems version 2026.5", (2026, 5, 0)),
        (report_of, "Generating '/tmp/nsys-report-1.qdstrm'\nGenerated:\n    /run/x.qdstrm\n", "/run/x.qdstrm"),
        (report_of, "Generated:\n    /run/x.nsys-rep\n", "/run/x.nsys-rep"),
        (report_of, "Generated:\n    /run/a b/x.qdstrm\n    /run/a b/x.nsys-rep\n", "/run/a b/x.nsys-rep"),
        (report_of, "Generating '/tmp/nsys-report-1.qdstrm'\n", None),
        (report_of, "", None),
    ],
)
def test_its_version_and_where_its_report_went_are_read(parse, text, found):
    assert parse(text) == found


OURS = {
    "SFTRIAGE_NSYS": "/usr/bin/nsys",
    "SFTRIAGE_NSYS_SESSION": "sft-run",
    "SFTRIAGE_NSYS_TRACE": "cuda,nvtx",
    "SFTRIAGE_NSYS_TMP": "/run/tmp",
    "SFTRIAGE_NSYS_RANK": "/run/tmp/rank",
    "PYTHON_EXEC": "/run/tmp/rank",
}


@pytest.mark.parametrize(
    ("environment", "name", "more"),
    [
        ({}, "sft-run-0.0", []),
        ({"RANK": "7"}, "sft-run-7.0", []),
        ({"RANK": "7", "TORCHELASTIC_RESTART_COUNT": "2"}, "sft-run-7.2", []),
        ({"RANK": "3", "SFTRIAGE_NSYS_ARMED": "/spool/nsys"}, "sft-run-3.0", ["--nvtx-capture=SFT_CAPTURE@*"]),
    ],
    ids=["alone", "a rank", "a restart", "armed on a range"],
)
def test_every_rank_and_every_attempt_has_its_session(environment, name, more):
    command = nsys_command({**OURS, **environment})
    assert command == ["/usr/bin/nsys", "launch", f"--session-new={name}", "--trace=cuda,nvtx", *more]


def test_nsys_sees_no_secret():
    real = {**OURS, "PATH": "/bin", "LD_LIBRARY_PATH": "/lib", "CUDA_VISIBLE_DEVICES": "1", "API_KEY": "x", "RANK": "3"}
    bare = bare_environment({**real, "TMPDIR": "/tmp"})
    assert set(bare) == {
        "PATH",
        "LD_LIBRARY_PATH",
        "CUDA_VISIBLE_DEVICES",
        "TMPDIR",
        "NSYS_NVTX_PROFILER_REGISTER_ONLY",
    }
    assert bare["TMPDIR"] == "/run/tmp"


@pytest.mark.parametrize(
    ("real", "injected", "expected"),
    [
        # What the trainer had, it has; what is ours, it has not.
        ({**OURS, "API_KEY": "x", "TMPDIR": "/tmp"}, {}, {"API_KEY": "x", "TMPDIR": "/tmp"}),
        # What nsys has added, it has too; what nsys was given and left, it has as before.
        ({**OURS, "A": "1"}, {"LD_PRELOAD": "x.so", "TMPDIR": "/run/tmp"}, {"A": "1", "LD_PRELOAD": "x.so"}),
        ({**OURS, "LD_PRELOAD": "jemalloc.so"}, {"LD_PRELOAD": "jemalloc.so:x.so"}, {"LD_PRELOAD": "jemalloc.so:x.so"}),
        # A Python of the job's own for torchrun is there again for torchruns that it starts itself.
        ({**OURS, "SFTRIAGE_NSYS_PYTHON": "/own"}, {}, {"PYTHON_EXEC": "/own"}),
        # Set by Python, not by nsys.
        (OURS, {"LC_CTYPE": "C.UTF-8"}, {}),
    ],
)
def test_the_trainer_has_its_environment_and_what_nsys_adds(real, injected, expected):
    found = trainer_environment(real, bare_environment(real), injected)
    assert found == {**expected, "NSYS_NVTX_PROFILER_REGISTER_ONLY": "0"}


@pytest.mark.parametrize(
    ("arguments", "environment", "command"),
    [
        (["--", "python3", "train.py"], {}, ["python3", "train.py"]),
        (["--", "prog", "--", "x"], {}, ["prog", "--", "x"]),
        (["-u", "train.py"], {"SFTRIAGE_NSYS_PYTHON": "/own/python"}, ["/own/python", "-u", "train.py"]),
    ],
)
def test_the_command_of_a_rank(arguments, environment, command):
    assert trainer_command(arguments, environment) == command


def test_in_the_place_of_torchruns_python_it_finds_that_python():
    # GIVEN a launcher that runs in a virtual environment, where Python is a link
    code = (
        f"import subprocess; subprocess.run([{sys.executable!r}, '-I', '-S', '-c', 'import os, runpy; "
        f'print(runpy.run_path("{nsys_rank.__file__}", run_name="x")["_python_of"](os.getppid()))\'])'
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == sys.executable


def test_an_abandoned_inner_half_does_not_become_the_trainer():
    read, write = nsys_rank._pair()
    command = [sys.executable, "-I", "-S", nsys_rank.__file__, nsys_rank.INNER, str(write)]
    process = subprocess.Popen(command, pass_fds=[write])
    os.close(write)
    assert int(os.read(read, 100)) == process.pid
    os.close(read)
    assert process.wait(60) == nsys_rank.UNKNOWN_STATUS


@pytest.mark.parametrize(("owner", "kept"), [("none", True), ("alive", True), ("dead", False)])
def test_a_session_registry_is_removed_only_if_a_dead_process_holds_its_lock(tmp_path, owner, kept):
    # GIVEN nsys's registry of this host, and who holds its lock
    ended = subprocess.Popen(["true"])
    ended.wait()
    registry = tmp_path / "NSys-2022.4.2.1"
    pid = {"none": 0, "alive": os.getpid(), "dead": ended.pid}[owner]
    registry.write_bytes((1).to_bytes(8, "little") + pid.to_bytes(8, "little") + bytes(100))
    # WHEN nsys hung or failed THEN a dead owner's is gone, and a new one can be made
    nsys_rank.release_registry(tmp_path)
    assert registry.exists() == kept


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
        (f"HOME=/root\0API_KEY={SECRET}\0PATH=/bin", False),
        (f"python train.py --hf_token {SECRET} --steps 3", False),
        (f"curl -H 'Authorization: Bearer {SECRET}'", False),
        (f"postgresql://trainer:{SECRET}@db/runs", False),
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
def test_the_value_after_the_name_of_a_secret_is_removed(before, name, separator, secret, after):
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
    found = examine(path)
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
    # WHEN it is examined THEN its contents are reported, other texts are unchanged, and no environment is left
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
    with pytest.raises(CaptureError, match=r"no GPU kernel.*use an nsys as new as the job's CUDA") as caught:
        check(contents(kernels=0), (3,), ("cuda",), complaint)
    assert complaint in str(caught.value)
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
        (contents(steps=(), events=0), (), ("osrt",), "no events"),
        (contents(kernels=0), (3,), ("nvtx", "cuda"), "no GPU kernel"),
    ],
)
def test_a_report_is_checked_against_what_was_promised(found, promised, traces, reason):
    with nullcontext() if reason is None else pytest.raises(CaptureError, match=reason):
        check(found, promised, traces)


@pytest.mark.parametrize("text", ["", "Traceback", "{}", "[]", json.dumps({"steps": 1})])
def test_what_the_program_did_not_print_is_a_reason(text):
    with pytest.raises(CaptureError, match="could not be examined"):
        contents_of(text)
