"""What commands refuse, and sentences about states that no recorded run is in."""

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from sftriage.controller.controller import Controller
from sftriage.model.captures import CaptureRequest, CaptureResult, Decision
from sftriage.model.events import CaptureChanged, Event, WindowJudged
from sftriage.model.verdicts import Pattern, Suspect, Verdict
from sftriage.model.windows import StageSchema, StepRecord, Window
from sftriage.policy.in_force import load_set
from sftriage.runs.captures import upload_words
from sftriage.runs.decisions import why_undecided
from sftriage.runs.directory import RunDirectory
from sftriage.runs.journal import Journal
from sftriage.runtime.copies import what_is_left
from sftriage.runtime.doctor import JobFound, Ranks, found_of
from sftriage.runtime.first_step import FREE_BYTES, Facts, begun_sentence, why_nothing
from sftriage.sinks.terminal import Reporter
from sftriage.traces.store import Upload
from sftriage.traces.uploading import UploadProgress
from sftriage.trainer.layout import RingInfo
from sftriage.trainer.seams.patches import NAMES
from sftriage.windows.npz import counted_of
from sftriage.words.decisions import capturing_sentence
from sftriage.words.verdicts import verdict_sentence
from tests.unit.conftest import run_going_on, run_in

REFUSED = """
    tracse
    traces shwo
    polcy list
    decisions --run .
    traces list --run slow --rank 7
    traces list --run slow --step 9..3
    traces list --run slow --since soon
    traces list --run slow --reproduced perhaps
    traces list --run slow --rank -1
    traces list --catalogue mysql://host/db
    traces list --catalogue here
    traces list --catalogue postgresql://me:s3cr3t@host/db
    traces list --store file:///nowhere/at/all
    traces for-step 5000 --run slow
    traces show x --run slow
    traces show other/run-1/w70 --run slow
    traces show ../w70 --run slow
    traces get .hidden --run slow
    traces get w70 --run slow --all --artefact trace.json.gz
    traces get w70 --run slow --out nowhere/
    traces open c-9 --run slow
    traces open w70 --run slow --artefact other
    traces open w70 --run slow --offline --artefact trace.json.gz
    traces prune --run slow
    traces prune --run slow --age soon
    traces prune --run slow --age 1d --bytes 5
    explain 9999 --run slow
    explain 0-48 --run slow
    explain w0-49-r0-x-1 --run slow
    explain ² --run slow
    decisions
    decisions --run made/empty --json
    traces list
    traces list --run made/empty --json
    traces list --run slow --rank 1000000000000000000000000000000
    traces show w0-9-r0-x-1
    traces for-step 1000000000000000000000000000000 --run slow
    evidence --run slow
    advise slow --gradients much
    advise slow --gradients 0MB
    advise slow --bandwidth 0
    advise slow --bandwidth inf
    advise slow --bandwidth nan
    advise slow --latency inf
    analyze slow --window 0
    analyze slow --stride -1
    analyze slow --window many
    whatif slow --timeline nowhere/x.json
    whatif none.parquet
    whatif none.npz
    whatif none
    whatif no-time.npz
    whatif one-step.npz
    whatif TRACE
    whatif TRACE no-time.npz
    reduce TRACE --save
    reduce TRACE --against manifest.json
    reduce TRACE --against nowhere
    reduce TRACE --map nowhere
    reduce TRACE --stage nope
    reduce TRACE --rank 3
    policy validate no-such-policy broken.yaml
    policy validate latin.yaml large.yaml pipe
    policy test default --on made/empty
    policy test default --on one-step.npz
    policy validate default broken.yaml no-such-policy --json
    policy test default --on slow --expect nothing
    policy test default --on slow --expect x --save x
    report slow --run slow
    ui --run slow --store share
    mcp --runs missing
    mcp --runs broken.yaml
    capture --run slow --rank 0 --reason look
    capture --run slow --rank 0 --reason look --profiler torch --native
    capture --run slow --rank 0 --reason look --native
    capture --run slow --rank 0 --reason look --profiler stacks --record-shapes
    capture --run slow --rank 0 --reason look --profiler torch --nsys-sqlite
    capture --run slow --rank 0 --reason look --max-bytes lots
    capture --run made/going --rank 0 --reason look --max-bytes 1Ki
    capture --run made/going --rank 0 --reason look --profiler nsys --nsys-trace cuda,nvtz
    kube policy
    kube policy -n x -A
    kube inject -f nowhere.yaml
    kube inject -f job.yaml --server-version v1.28.3
    kube inject -f job.yaml --server-version new
    kube controller --job-id ml/resnet --policies p --run r --creds c
    operator --runs-claim runs
    operator --lease sftriage-operator
    operator --settings nowhere.yaml
    operator --store ftp://x
    demo --cause list
    demo --out new --policy defualt
    demo --cause garbage:
    demo --cause garbage:-1
    demo --cause garbage:4
    demo --cause dust
    demo --cause garbage --fault none
    demo --fault data:2
    demo --fault data:9:40
    demo --fault loader:1:40
    demo --fault data:-1:40
    demo --fault data:1:-4
    demo --fault data:1:nan
    demo --fault none --fault data:1:5
    run --out slow -- true
    run --out new -- torchrunn train.py
    run --out new --policy defualt -- true
    run --out new --keep-steps lots -- true
    run --out new --keep-steps 10Ki -- true
    run --out new --keep-steps-for 10 -- true
    run --out new --keep-steps-for 1s -- true
    run --out new --drop-local -- true
    run --out new --store ftp://host/x -- true
    run --out new --store s3://key:SECRET@bucket -- true
    run --out new --store /dev/null/x -- true
    run --out new --metrics-host 0.0.0.0 -- true
    run --out new --metrics-token-file x -- true
    run --out new --metrics-port 0 --metrics-host 0.0.0.0 -- true
    run --out new --metrics-port 0 --metrics-token-file /nowhere/token -- true
    run --out new --metrics-per-rank -- true
    run --out new --metrics-file /tmp/metrics.txt -- true
    run --out new --metrics-file /nowhere/x.prom -- true
""".strip().splitlines()
BROKEN = """
apiVersion: sftriage.dev/v1alpha1
kind: TriagePolicy
metadata: {name: mine}
spec: {rules: [{name: slow-input, match: {stage: [data]}, capture: {stepz: 3}}]}
"""


JOB = "{apiVersion: batch/v1, kind: Job, metadata: {name: resnet}, spec: {template: {spec: {containers: [{name: a}]}}}}"
WRONG = Path(__file__).with_name("wrong.yaml")
ELSEWHERE = (
    ("psycopg", "traces list --catalogue postgresql://host/db"),
    ("pyarrow", "whatif seq_id.parquet"),
    ("pyarrow", "whatif one-step.npz"),
    ("prometheus_client", "run --out new --metrics-port 0 -- true"),
    ("opentelemetry.exporter.otlp.proto.http", "run --out new --otel -- true"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL=grpc", "run --out new --otel -- true"),
    ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=grpc", "run --out new --otel -- true"),
    ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=many", "run --out new --otel -- true"),
)
"""Libraries that are missing and variables that are set, and a command that refuses because of it."""
COLUMNS = {"seq_id": None, "start_ts": ["soon"], "step": [1.5], "duration": [None], "optype": ["mine"]}
"""A wrong column of a trace in Parquet, in a file of its name; None leaves it out."""


def refused(root: Path, trace: Path, sftriage: Callable[..., str]) -> Iterator[str]:
    """Commands that a person has to mend, or that find nothing; and what they leave behind."""
    _make_files(root, trace)
    files, before = set(root.iterdir()), ""
    for command in REFUSED:
        yield sftriage(*command.replace("TRACE", str(trace.relative_to(root))).split())
    wrong = yaml.safe_load(WRONG.read_text(encoding="utf-8"))
    parts = wrong.pop("parts")
    for name, commands in wrong.items():
        for command, texts in commands.items():
            for text in texts:
                content = text.replace("GOOD", parts["GOOD"]).replace("HEAD", parts["HEAD"])
                (root / name).write_text(content, encoding="utf-8")
                yield ("" if text == before else f"{name}: {json.dumps(text)}\n") + sftriage(*command.split())
                before = text
        (root / name).unlink()
    for what, command in ELSEWHERE:
        name, _, value = what.partition("=")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name, value) if value else patch.setitem(sys.modules, name, None)
            yield f"{what}\n{sftriage(*command.split())}"
    for column in COLUMNS:
        yield sftriage("whatif", f"{column}.parquet")
    yield f"left behind: {sorted(path.name for path in set(root.iterdir()) - files)}"


def _make_files(root: Path, trace: Path) -> None:
    from pyarrow import parquet, table

    (root / "broken.yaml").write_text(BROKEN, encoding="utf-8")
    (root / "latin.yaml").write_bytes(BROKEN.encode() + b"# caf\xe9\n")
    (root / "large.yaml").write_bytes(b"#" * 10_000_000)
    os.mkfifo(root / "pipe")
    (root / "job.yaml").write_text(JOB, encoding="utf-8")
    shutil.copy(trace.with_name("manifest.json"), root)
    run_in(root / "made" / "empty")
    run_going_on(root / "made" / "going")
    for name, steps, took_s in (("no-time", 9, 0.0), ("one-step", 1, 1.0)):
        durations_NRS = np.full((steps, 2, 3), took_s)
        stages = ["data", "backward", "other"]
        np.savez(root / f"{name}.npz", durations_s=durations_NRS, stages=stages, sync=["backward"])
    whole = {name: [0] for name in ("dp_rank", "stage", "step", "seq_id", "mc", "mb_id", "gmc")}
    whole |= {"optype": ["forward-compute"], "start_ts": [0.0], "duration": [1.0]}
    for column, value in COLUMNS.items():
        values = {name: one for name, one in (whole | {column: value}).items() if one is not None}
        parquet.write_table(table(values), root / f"{column}.parquet")


def four_windows(path: Path) -> RunDirectory:
    """A run of four windows: healthy, a slow rank, two that are slow alike, and one that waited for a CPU."""
    directory = run_in(path)
    journal = Journal(directory.decisions)
    controller = Controller(load_set(["default"]), journal, directory.state)
    for first_step, late_ms in ((0, {}), (50, {2: 20, 1: 4}), (100, {1: 20, 3: 20}), (150, {0: 20})):
        noise_NRS = np.random.default_rng(first_step).standard_normal((50, 4, 3))
        durations_NRS = np.array([0.020, 0.025, 0.005]) * (1.0 + 0.01 * noise_NRS)
        for rank, late in late_ms.items():
            durations_NRS[:, rank, 0] += late / 1e3
        durations_NRS[:, :, 1] += durations_NRS[:, :, 0].max(axis=1, keepdims=True) - durations_NRS[:, :, 0]
        schema = StageSchema(("data", "backward", "optimizer"), ("backward",))
        queued_NR = np.outer(np.ones(50), (0.03, 0.0, 0.0, 0.0))
        counted_NRC = counted_of({"queued_s": queued_NR, "preempted": 500.0 * queued_NR}) if first_step == 150 else None
        controller.take(Window(schema, first_step, durations_NRS, counted_NRC=counted_NRC), 1.8e9 + first_step)
    journal.close()
    return directory


def explained(root: Path, sftriage: Callable[..., str]) -> Iterator[str]:
    (root / "of-tests").mkdir()
    four_windows(root / "of-tests" / "explained")
    for what in ("0-49", "70", "w50-99-r2-slow-rank-1", "149", "199"):
        yield sftriage("explain", what, "--run", "of-tests/explained")


def sentences() -> Iterator[str]:
    """Sentences by what they are about, in the order in which a run meets them."""
    yield from ("Why no step is recorded", *map(_why_nothing, FACTS), "", "What recording begins with", *_begun(), "")
    yield "What a job's script leaves open"
    for what, found in MISSING.items():
        yield f"  {what}"
        for one in found.missing:
            yield from (f"    {one.what}", *(f"      | {line}" for line in one.lines))
    yield from ("", "Stalls", *(f"  {verdict_sentence(one)}" for one in STALLS))
    yield from ("", "Captures that begin", *(f"  {capturing_sentence(requests)}" for requests in CAPTURED))
    yield from ("", "Steps that no window holds", *(f"  {why_undecided(*one, ended=over)}" for *one, over in UNDECIDED))
    yield from ("", "What is not in the store", *(f"  {what_is_left(one)}" for one in UPLOADS))
    yield from ("", "Uploads", *(f"  {upload_words(one)}" for one in UPLOADED), "")
    for what, happens in HAPPENING.items():
        yield from (f"On stderr: {what}", *(f"  {line}" for line in _on_stderr(happens)), "")


AUTO, BY_HAND = Facts(auto=True, torch=2), Facts(auto=False, torch=2)
FIRED = replace(AUTO, fired={"backward": 7, "optimizer": 0})
OVER, HIDDEN = replace(AUTO, over=True, status=0), frozenset({"PYTHONPATH"})
FACTS = (
    # a step is recorded, however the job ended; then while it runs
    replace(OVER, steps=1, status=1),
    *(Facts(auto=True), Facts(auto=False), AUTO, FIRED, replace(FIRED, compiling=True), replace(AUTO, compiling=True)),
    *(replace(AUTO, fired={"backward": n, "optimizer": n}) for n in (1, 3)),
    replace(AUTO, rings=2),
    *(replace(FIRED, failed={seam: "RuntimeError('broken')"}) for seam in ("optimizer", "data")),
    *(replace(FIRED, free_bytes=FREE_BYTES - 1), replace(FIRED, free_bytes=2048), replace(AUTO, rings=1, free_bytes=0)),
    *(BY_HAND, replace(BY_HAND, rings=2), replace(BY_HAND, free_bytes=0)),
    *(replace(AUTO, by_hand=True), replace(AUTO, by_hand=True, rings=1)),
    # what keeps the seams from the trainers, of which a Monitor needs only the place of the rings
    *(replace(AUTO, hidden=HIDDEN | {more}) for more in ("PYTHONPATH", "-I", "-E", "-S", "SFTRIAGE_RINGS")),
    replace(AUTO, hidden=frozenset({"SFTRIAGE_SEAMS"})),
    *(replace(BY_HAND, hidden=HIDDEN | {"-I"}), replace(BY_HAND, hidden=frozenset({"SFTRIAGE_RINGS"}))),
    # and which is not why where some train under seams all the same
    replace(FIRED, hidden=HIDDEN),
    # how it ended
    *(OVER, replace(OVER, torch=0), *(replace(OVER, status=status) for status in (1, 3, 137))),
    replace(OVER, status=1, hidden=HIDDEN),
    *(replace(OVER, status=130, ended_by=2), replace(OVER, ended_by=15)),
    *(replace(OVER, status=status, seconds=20.0) for status in (0, 1)),
    replace(OVER, status=None, seconds=20.0, compiling=True),
    replace(OVER, status=0, compiling=True),
)


def _why_nothing(facts: Facts) -> str:
    reason = why_nothing(facts)
    return "  recorded" if reason is None else f"  {reason.code}: {reason.words}"


def _begun() -> Iterator[str]:
    schema = StageSchema(("data", "forward", "backward", "optimizer", "other"), ("backward",))
    for ranks, world_size, first_verdict in ((3, 3, (71, 71)), (1, 1, ()), (2, 8, (71, 15))):
        yield f"  {begun_sentence(ranks, world_size, schema, first_verdict)}"


STAGES = ("data", "forward", "backward", "optimizer", "other")
NOTHING = Ranks((), (), ())


def report(rank: str = "0", **changed: object) -> dict[str, object]:
    """What a trainer's seams have reported: everything."""
    fired = dict.fromkeys(NAMES, 10) | changed.pop("fired", {})
    everything = {"rank": rank, "rounds": 10, "fired": fired, "failed": {}, "by_hand": False, "kineto": True}
    return everything | {"models": ["DistributedDataParallel"]} | changed


def ranks(
    *reports: dict[str, object],
    sync: tuple[str, ...] = ("backward",),
    world_size: int = 2,
    durations_ns: tuple[int, ...] = (10, 20, 60, 5, 5),
    ready_ns: int | None = None,
    stages: tuple[str, ...] = STAGES,
) -> Ranks:
    """Two ranks, each with a step."""
    infos = tuple(
        RingInfo(rank, world_size, rank, 0, "job", "node", "", StageSchema(stages, sync), 1, 2, 3, 4, "C")
        for rank in range(world_size)
    )
    step = StepRecord(0, 2, 0, 0, durations_ns, (0,) * len(sync), True, False, ready_ns)
    return Ranks(infos, ((step,),) * world_size, reports)


def by_hand(**changed: object) -> Ranks:
    """What two ranks with a Monitor of the script's own have recorded."""
    return ranks(*(report(rank, by_hand=True, fired=dict.fromkeys(NAMES, 0)) for rank in "01"), **changed)


GOOD = by_hand(ready_ns=1)
LEFT = replace(GOOD, steps=tuple((replace(last, complete=False), last) for (last,) in GOOD.steps))
COLLECTING = report(collectives={"all_reduce (async) in backward": 4})
_EXCHANGES = {"sync": ("exchange",), "stages": (*STAGES[:3], "exchange", *STAGES[3:])}
MISSING: dict[str, JobFound] = {
    "all is seen": found_of(ranks(report("0"), report("1"), report("", rounds=0, fired=dict.fromkeys(NAMES, 0)))),
    "no batch, no sync stage": found_of(ranks(report(fired={"data": 0}), sync=())),
    "no exchange": found_of(ranks(COLLECTING, COLLECTING, durations_ns=(10, 20, 60, 0, 5, 5), **_EXCHANGES)),
    "an exchange": found_of(ranks(COLLECTING, durations_ns=(10, 20, 50, 10, 5, 5), **_EXCHANGES)),
    "FSDP": found_of(ranks(report(), sync=("forward", "backward"))),
    "a seam that failed": found_of(ranks(report(fired={"data": 0}, failed={"data": "RuntimeError('broken')"}))),
    "no optimizer": found_of(replace(NOTHING, reports=(report(fired={"optimizer": 0}, rounds=0),))),
    "nothing is known": found_of(NOTHING),
    "not reached": found_of(NOTHING, Facts(auto=True, torch=2, status=0, hidden=HIDDEN)),
    "time in no stage": found_of(ranks(report(), durations_ns=(10, 20, 30, 5, 35))),
    "time in no stage, no batch": found_of(ranks(report(fired={"data": 0}), durations_ns=(0, 20, 30, 5, 45))),
    "failed after a step": found_of(ranks(report()), Facts(auto=True, status=1)),
    "failed before a step": found_of(replace(NOTHING, reports=(report(rounds=0),)), Facts(auto=True, status=137)),
    "a good Monitor": found_of(by_hand(ready_ns=50)),
    "a Monitor without ready moments": found_of(by_hand()),
    "a Monitor without sync stage": found_of(by_hand(sync=())),
    "a Monitor, a stage is never entered": found_of(by_hand(ready_ns=1, durations_ns=(0, 20, 60, 5, 5))),
    "a Monitor, time in no stage": found_of(by_hand(ready_ns=1, durations_ns=(10, 20, 30, 5, 35))),
    "a Monitor, steps are left": found_of(LEFT),
    "a Monitor, misused": found_of(replace(GOOD, misuse=7)),
    "a Monitor, no step": found_of(replace(by_hand(), steps=((), ()))),
    "a Monitor that records elsewhere": found_of(replace(by_hand(), infos=(), steps=())),
    "a Monitor, one rank each": found_of(by_hand(ready_ns=1, world_size=1)),
}


def stall(*suspects: Suspect, reasons: tuple[str, ...] = ("not_arrived",), missing: int = 1, typical_s: float = 0.02):
    numbers = {"still_s": 61.3, "typical_step_s": typical_s, "missing_ranks": float(missing)}
    return Verdict(41, 41, "stalled", reasons, suspects, 62.0, {}, {}, numbers)


def judged(first: int, pattern: Pattern, *requests: CaptureRequest, reason: str = "", gain_s: float = 0.02) -> Event:
    """A window that names rank 1 in data, and what follows from it."""
    suspect = Suspect("rank", (1,), "data", gain_s, 0.2, 0.9, rank=1, pattern=pattern, onset_step=57)
    verdict = Verdict(first, first + 39, "suspect", (), (suspect,), 0.1, {"data": 0.1}, {"data": 1}, {})
    outcome = ("capture", "rule_matched") if requests else ("throttle", reason) if reason else ("hold", "one_off")
    return WindowJudged(verdict, Decision(float(first), first, first + 39, "suspect", *outcome, requests=requests))


def held(first: int, reason: str = "", label: str = "needs_evidence") -> Event:
    reasons = (reason,) if reason else ()
    verdict = Verdict(first, first + 39, label, reasons, (), 0.1, {"data": 0.1}, {"data": 1}, {})
    return WindowJudged(verdict, Decision(float(first), first, first + 39, label, "hold", "undecided"))


def ended(capture_id: str, state: str, **also: object) -> Event:
    return CaptureChanged(1.0, CaptureResult(capture_id, 1, state, **also), stored_bytes=2048)


def _on_stderr(happens: Sequence[Event]) -> Iterator[str]:
    printed = io.StringIO()
    reporter = Reporter(Console(file=printed, width=400, highlight=False))
    for event in happens:
        reporter.take(event)
    printed.write("(the end)\n")
    reporter.finish()
    yield from printed.getvalue().splitlines()
    yield f"{reporter.windows} windows, {reporter.captures} captures"


def _rank(number: int, stage: str) -> Suspect:
    return Suspect("rank", (number,), stage, 61.3, 0.99, 1.0, rank=number)


STALLS = (
    stall(_rank(1, "forward")),
    stall(_rank(1, "forward"), _rank(2, "data"), missing=9),
    stall(Suspect("host", (4, 5), "data", 61.3, 0.99, 1.0, host="node-2"), missing=2),
    stall(Suspect("all", (0, 1), "data", 61.3, 0.99, 1.0), reasons=("no_rank_waits",), missing=2),
    stall(reasons=("in_sync",), missing=0),
    stall(reasons=("outside_steps",), missing=0, typical_s=0.0),
)


def _request(rank: int, role: str = "suspect", profiler: str = "torch", steps: int = 3) -> CaptureRequest:
    return CaptureRequest(f"c-{rank}", rank, profiler, steps, 1, 60.0, 2**29, role=role)


CAPTURED = (
    [_request(2)],
    [_request(2), _request(1, "control")],
    [_request(2, steps=1), _request(5, steps=1), _request(1, "control"), _request(3, "control")],
    *([_request(2, profiler=profiler)] for profiler in ("nsys", "stacks")),
    [_request(1, "control")],
)
STALL = WindowJudged(STALLS[0], Decision(1.0, 41, 41, "stalled", "hold", "standstill"))
HAPPENING: dict[str, Sequence[Event]] = {
    "a fault that seemed to pass is chronic after all": (
        *(judged(first, "one-off", gain_s=2.0) for first in (40, 50)),
        judged(60, "chronic", _request(1, steps=4)),
    ),
    "captures end": (
        *(ended("c-1", state) for state in ("accepted", "armed", "running")),
        ended("c-1", "stored", first_step=60, last_step=63),
        ended("c-2", "refused", detail="torch is not imported"),
    ),
    "a delay without a culprit, for one reason or another, and then health": (
        *(held(first, ("roaming", "co_critical", "self_inflicted")[first // 10 % 3]) for first in range(0, 100, 10)),
        held(100, label="healthy"),
    ),
    "a delay to the end of a short job": tuple(held(first, "co_critical") for first in range(0, 60, 10)),
    "a suspect is not captured, for one reason or another": tuple(
        judged(40 + 10 * n, "chronic", reason=reason)
        for n, reason in enumerate(("already_captured", "cooldown", "overhead_budget") * 3)
    ),
    "a stall between healthy windows": (
        *(held(0, label="healthy"), held(10, "in_sync", label="stalled"), held(20, label="healthy")),
    ),
    "the same stall twice": (STALL, STALL),
}
UNDECIDED = (
    *(([], 5, over) for over in (False, True)),
    ([(20, 69), (30, 79)], 5, True),
    *(([(20, 69), (30, 79)], 99, over) for over in (True, False)),
    ([(20, 69), (200, 249)], 99, False),
)
UPLOADS = (
    *(UploadProgress(), UploadProgress(taken=True)),
    *(
        UploadProgress(checked=True, left=left)
        for left in ({"a": ""}, {"a": "full", "b": "full"}, {"a": "full", "b": "away"})
    ),
    UploadProgress(checked=True, left={"a": ""}, removals={"b": "away"}),
)
UPLOADED = (
    *(Upload(url="s3://b", state=state) for state in ("waiting", "uploading")),
    Upload(url="s3://b", state="waiting").failed("no\nanswer"),
    Upload(url="s3://b", state="stored", verified_at=datetime(2027, 1, 15, 8, tzinfo=timezone.utc)),
)
