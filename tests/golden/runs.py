"""The runs of the golden record, made up from fixed seeds: step logs, and what a real controller makes of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np

from sftriage.controller.controller import Controller, shape_of
from sftriage.model.captures import CaptureRequest, CaptureResult, ManualRequest
from sftriage.model.events import (
    DiskRecovered,
    Event,
    EvidenceGathered,
    JobPaused,
    NamedPolicy,
    Observation,
    Pipeline,
    PolicyChanged,
    RemedyChanged,
    RingGivenUp,
    Span,
    TakenOver,
)
from sftriage.model.windows import JobStatus, RankStatus, StepRecord, Window
from sftriage.policy.in_force import find, load_set
from sftriage.runs.directory import RunDirectory, RunInfo, create
from sftriage.runs.journal import Journal
from sftriage.runs.recordings import load_recording
from sftriage.runtime.reducing import Annotations
from sftriage.traces.manifest import Artefact, CaptureInfo, Manifest, TriggerInfo, may_contain
from sftriage.traces.store import FileToStore
from sftriage.trainer.layout import RingInfo
from sftriage.windows.rings import status_of
from sftriage.windows.steplog import StepLog
from tests.scenario import Fault, Job, every, from_step, of_rank
from tests.unit.reduce.heavy import document, job_events, write

T0_S = 1_800_000_000.0
NOW_S = T0_S + 3600.0
NS = 1_000_000_000
STACKS = "stacks.speedscope.json"

Watch = Callable[[Event | Observation], None]


@dataclass
class Made:
    """A run that was made up: its directory, the steps of all its ranks, and the controller that judged them."""

    directory: RunDirectory
    window: Window
    controller: Controller
    annotations: Annotations
    ends_s: np.ndarray
    controller_step: int = 0
    touched: set[int] = field(default_factory=set)

    def at(self, step: int) -> float:
        return T0_S + float(self.ends_s[min(step, len(self.ends_s) - 1)])

    def status(self, step: int, waiting: Mapping[int, str], age_s: int = 0) -> JobStatus:
        """The job, so long in a step: ranks at a stage of their own, the others in `backward`."""
        age_ns = age_s * NS
        hosts = self.window.hosts or ("node-1",) * self.window.durations_NRS.shape[1]
        ranks = tuple(
            RankStatus(rank, host, waiting.get(rank, "backward"), age_ns, step, age_ns, step, closed=False, alive=True)
            for rank, host in enumerate(hosts)
        )
        return status_of(self.window.schema, len(hosts), ranks)

    def store(self, request: CaptureRequest) -> None:
        """Have a capture run, be stored, and be looked into."""
        first = request.begins_at(self.controller_step + 1 + request.warmup_steps)
        last, now_s = first + request.steps - 1, self.at(first + request.steps)
        self.touched |= set(range(first - request.warmup_steps, last + 1))
        why = self.controller.trigger_of(request.capture_id)
        slow = why.ranks[0] if why.ranks and why.label == "suspect" else None
        events = job_events(request.rank, slow, steps=request.steps, first=first, stage=why.stage or "data")
        ranks = self.window.durations_NRS.shape[1]
        sampled = request.profiler == "stacks"
        content = stacks_of(range(first, last + 1)) if sampled else document(events, request.rank, ranks)
        source = write(self.directory.path / "exported.json", content)
        file = FileToStore(source, STACKS, "application/json", compress=False) if sampled else FileToStore(source)
        result = CaptureResult(
            *(request.capture_id, request.rank, "stored"),
            first_step=first,
            last_step=last,
            timings_s={"start": 0.25, "stop": 0.5, "overhead": 0.75},
            clock={"monotonic_ns": 5, "epoch_ns": int(now_s) * NS},
        )
        host = (self.window.hosts or ("node-1",) * ranks)[request.rank]
        info = CaptureInfo.of(request, result, world_size=ranks, host=host)

        def manifest(artefacts: tuple[Artefact, ...]) -> Manifest:
            return Manifest(
                capture_id=request.capture_id,
                job="resnet",
                run=self.directory.path.name,
                created_at=datetime.fromtimestamp(round(now_s), timezone.utc),
                trigger=TriggerInfo.of(why),
                capture=info,
                artefacts=artefacts,
                may_contain=may_contain({}),
            )

        self.controller.changed(CaptureResult(request.capture_id, request.rank, "running"), now_s - 1)
        found = self.controller.reproduced(request.capture_id, self.window.steps(first, last))
        stored = self.annotations.store.put_files(request.capture_id, [file], manifest)
        source.unlink()
        self.controller.changed(result, now_s, found, stored.artefacts[0].size_bytes)
        self.annotations.stored(request.capture_id, found, ("The clock of its GPU is lower than the others'.",))
        for cause in self.annotations.causes(now_s + 1):
            self.controller.explained(cause)


def make(
    path: Path,
    job: Job,
    *faults: Fault,
    split: bool = False,
    device: bool = False,
    policy: str = "default",
    watch: Watch = lambda seen: None,
    seed: int = 7,
    kinds: Mapping[int, str] | None = None,
) -> Made:
    """A run directory with the steps of a job, and a controller's judgement of every window and its captures."""
    window = job.run(*faults, seed=seed, split=split)
    policies = load_set([policy])
    sha256 = policies.loaded[0].sha256
    created = datetime.fromtimestamp(T0_S, timezone.utc).isoformat(timespec="seconds")
    info = RunInfo(path.name, "resnet", created, ("torchrun", "train.py"), policy, sha256, "/nowhere/rings")
    directory = create(path, info, find(policy).read_text(encoding="utf-8"))
    _log(directory, window, kinds or {})
    if device:
        _log(directory, job.run(*faults, seed=seed + 1, split=split), kinds or {}, kind="device-steps")
    ends_s = np.round(np.cumsum(window.durations_NRS.sum(axis=2).max(axis=1)), 3)
    journal = Journal(directory.decisions)
    annotations = Annotations(directory)
    made = Made(directory, window, Controller(policies, journal, directory.state, watch), annotations, ends_s)
    asked = list[CaptureRequest]()
    for one in load_recording(path).windows(shape_of(policies.detection)):
        while asked:
            made.store(asked.pop())
        made.controller_step = one.last_step
        step_N = np.arange(one.first_step, one.last_step + 1)
        touched_N = np.isin(step_N, [*made.touched])
        one = replace(one, capturing_N=touched_N) if touched_N.any() else one
        starts = np.concatenate([[0.0], ends_s])
        spans = {
            step: Span(int((T0_S + starts[step]) * NS), int((T0_S + ends_s[step]) * NS))
            for step in range(one.first_step, one.last_step + 1)
        }
        judged = made.controller.take(one, made.at(one.last_step), spans)
        for cost in made.controller.costs:
            annotations.costed(cost)
        asked += judged.decision.requests[::-1]
    return made


def _log(directory: RunDirectory, window: Window, kinds: Mapping[int, str], kind: str = "steps") -> None:
    ns_NRS = np.rint(window.durations_NRS * 1e9).astype(np.int64)
    n_steps, n_ranks, _ = ns_NRS.shape

    def ns(values: Any) -> Any:
        return np.rint(values * 1e9).astype(np.int64)

    between_NR = ns(window.between_NR)
    for rank in range(n_ranks):
        host = window.hosts[rank] if window.hosts else "node-1"
        cohort = window.cohorts[rank] if window.cohorts else ""
        at_ns, records = 0, []
        for step in range(n_steps):
            at_ns += int(between_NR[step, rank])
            durations = tuple(ns_NRS[step, rank].tolist())
            ready = None if window.ready_NR is None else int(ns(window.ready_NR[step, rank]))
            outside = () if window.outside_NRG is None else tuple(ns(window.outside_NRG[step, rank]).tolist())
            between = int(between_NR[step, rank])
            records.append(
                StepRecord(rank, step, at_ns, between, durations, outside, True, False, ready, kinds.get(step, ""), 512)
            )
            at_ns += sum(durations)
        about = RingInfo(rank, n_ranks, rank, 0, "resnet", host, cohort, window.schema, 0, int(T0_S) * NS, 1, 0)
        log = StepLog(directory.steps, about, kind=kind)
        log.append(of_rank(1, *records, schema=window.schema))
        log.close()


def stacks_of(steps: range) -> dict[str, Any]:
    """A sample every 5 ms of 40 ms in `data` of each step, all of them of one line that sleeps."""
    taken = [(step, number) for step in steps for number in range(1, 9)]
    none = {"run_ns": [0] * len(taken), "waited_ns": [0] * len(taken)}
    frames = [
        {"name": "main", "file": "/job/train.py", "line": 12},
        {"name": "Images.__getitem__", "file": "/job/data.py", "line": 57},
    ]
    about = {
        "time_ns": [step * 140_000_000 + number * 5_000_000 for step, number in taken],
        "step": [step for step, _ in taken],
        "stage": ["data"] * len(taken),
        "since_ns": [step * 140_000_000 for step, _ in taken],
        "schema_version": 1,
        "period_s": 0.005,
        "threads": [none],
        "sampler": none,
        "source": ["batch = next(batches)", "time.sleep(0.04)"],
    }
    profile = {"name": "MainThread", "samples": [[0, 1]] * len(taken)}
    return {"shared": {"frames": frames}, "profiles": [profile], "sftriage": about}


def slow(path: Path, watch: Watch = lambda seen: None) -> Made:
    """Four ranks on one host; rank 1 is slow in data from step 100 on, and rank 3 in forward in every 20th step."""
    faults = Fault("data", 1, 0.04, from_step(100)), Fault("forward", 3, 0.03, every(20, 7))
    made = make(path, Job(n_steps=210), *faults, watch=watch)
    ask = ManualRequest("ask-1", (2,), "ada", "loss spikes", "torch")
    decision = made.controller.decide_request(ask, made.status(195, {}), made.at(195))
    for request in decision.requests:
        made.controller_step = 195
        made.store(request)
    return made


def hosts(path: Path, watch: Watch = lambda seen: None) -> Made:
    """Eight ranks on two hosts and of two cohorts, one host slow; then it stalls, and everything else happens."""
    job = Job(n_ranks=8, n_steps=200, hosts=("node-1",) * 4 + ("node-2",) * 4, cohorts=("pp0", "pp1") * 4)
    slow_host = Fault("forward", (4, 5, 6, 7), 0.03, from_step(90))
    made = make(path, job, slow_host, Fault("backward", None, 3.0, from_step(160, 161)), watch=watch, seed=11)
    now_s, record = made.at(200), made.controller.record
    record(EvidenceGathered(now_s + 1, 120, 169, ("GPU of rank 5: clocks are low.",), ready_fraction=0.5))
    record(PolicyChanged(now_s + 2, "changed", (NamedPolicy("default", "0" * 64),), later=("detection.window_steps",)))
    record(PolicyChanged(now_s + 3, "refused", (NamedPolicy("default"),), ("policy.yaml:3: spec.rules: missing",)))
    record(TakenOver(now_s + 4, "node-2", 4711, 20, 1))
    record(DiskRecovered(now_s + 6, now_s + 5, "No space left on device", late={"windows": 2}, lost={"steps": 9}))
    record(RingGivenUp(now_s + 7, 3, "its header is damaged"))
    record(JobPaused(now_s + 8, 0, 190, 192, 8.0, "backward", "in_sync"))
    about = {"attempt": 0, "step": 195, "rank": 5, "who": "rank 5", "where": "forward", "switch": "g"}
    tried = {"on_s": 0.12, "off_s": 0.13, "saves_s": 0.01, "error_s": 0.001, "on_steps": 20.0, "off_steps": 20.0}
    record(RemedyChanged(now_s + 9, remedy="stragglar", state="trying", reason="worthwhile", **about))
    record(RemedyChanged(now_s + 10, remedy="stragglar", state="kept", reason="helps", numbers=tried, **about))
    link = Pipeline((0.01,) * 4, (0.02,) * 4, (0.001, 0.02, 0.001), microbatches=8, most_S=(8,) * 4)
    about |= {"who": "the link between ranks 1 and 2", "rank": 1, "switch": "h"}
    numbers = {"delay_s": 0.02}
    advised = {"state": "advised", "reason": "not_allowed", "numbers": numbers, "pipeline": link}
    record(RemedyChanged(now_s + 11, remedy="pipeline", **advised, **about))
    for step in range(190, 200):
        made.controller.look(made.status(step, {}), step * NS // 10, made.at(step))
    for age_s in range(0, 240, 5):
        judged = made.controller.look(made.status(200, {5: "forward"}, age_s), (20 + age_s) * NS, now_s + 12 + age_s)
        for request in () if judged is None else judged.decision.requests:
            result = CaptureResult(request.capture_id, request.rank, "failed", "the rank did not answer")
            made.controller.changed(result, now_s + 13 + age_s)
    return made


def device(path: Path, watch: Watch = lambda seen: None) -> Made:
    """Four ranks on GPUs, with device times and the split of backward; rank 2 is slow in backward, and evaluates."""
    job, fault = Job(n_steps=200), Fault("backward", 2, 0.03, from_step(100))
    kinds = dict.fromkeys(range(49, 200, 50), "evaluation")
    return make(path, job, fault, split=True, device=True, watch=watch, seed=5, kinds=kinds)
