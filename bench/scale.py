"""What one core needs for the windows of a large job: gathering its steps, accounting for them, and a verdict.

The job is synthetic: every rank jitters, one is slow in `data`, and the others wait for it in `backward`. The kernel's
counters of each rank are there, as in a real job, unless `--uncounted`. Making it up is not timed. Times are of the
processor, which neighbours on the machine do not lengthen as they do the clock's, and medians over rounds in which the
work that is compared takes turns; ratios are to one pass of numpy over the durations (`durations.max()`). Memory is
what numpy and Python allocate (tracemalloc), in a job of its own that is not timed, as a multiple of the bytes of a
window's durations.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from sftriage.model.verdicts import Settings, Verdict
from sftriage.model.windows import COUNTERS, OTHER, StageSchema, Window
from sftriage.trainer.layout import RingInfo
from sftriage.verdict.accounting import anchored
from sftriage.verdict.judging import judge
from sftriage.windows.decoding import BETWEEN, DURATIONS, READY, STEP, UNKNOWN, StepArrays, decode
from sftriage.windows.gather import Gatherer, Shape
from sftriage.windows.rings import Rows

MS_NS = 1_000_000
JITTER = 0.02
SLOW_STAGE, SYNC_STAGE = "data", "backward"
SLOW_MS = 20.0
COUNTED = 1e-3
"""What the kernel counts of each in a step, in the mean."""
STAGES_MS = {"data": 20.0, "h2d": 5.0, "forward": 25.0, "backward": 35.0, "clip": 2.0, "optimizer": 8.0, "hooks": 1.0}
"""A step of about 100 ms, less what jitter and waiting add."""


QUICK = {"ranks": 256, "hosts": 32, "rounds": 2}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=16384)
    parser.add_argument("--stages", type=int, default=8, help="stages, `other` among them (3 to 32)")
    parser.add_argument("--window", type=int, default=50, help="steps in a window")
    parser.add_argument("--stride", type=int, default=10, help="steps from one window to the next")
    parser.add_argument("--hosts", type=int, default=2048)
    parser.add_argument("--cohorts", type=int, default=1, help="roles that the ranks have, equally many of each")
    parser.add_argument("--scattered", action="store_true", help="deal the ranks out to the hosts, not in rows")
    parser.add_argument("--uncounted", dest="counted", action="store_false", help="without the kernel's counters")
    parser.add_argument("--rounds", type=int, default=7, help="windows that are timed")


class Job:
    def __init__(self, options: argparse.Namespace) -> None:
        # However few stages: the slow one and the sync are among them; more than there are names for come after it.
        extra = [name for name in STAGES_MS if name not in (SLOW_STAGE, SYNC_STAGE)] + [f"extra-{n}" for n in range(32)]
        chosen = {SLOW_STAGE, SYNC_STAGE, *extra[: options.stages - 3]}
        names = tuple(name for name in (*STAGES_MS, *extra[len(STAGES_MS) - 2 :]) if name in chosen)
        self.schema = StageSchema((*names, OTHER), (SYNC_STAGE,))
        self.shape = Shape(options.window, options.stride, 0)
        self.options = options
        self.slow_rank = options.ranks // 3
        self.ranks_R = np.arange(options.ranks)
        self.step = 0
        self._own_S = np.array([STAGES_MS.get(name, 1.0) for name in self.schema.stages])
        self._sync = self.schema.stages.index(SYNC_STAGE)
        self._carried_R = np.zeros(options.ranks)
        self._random = np.random.default_rng(7)

    def gatherer(self) -> Gatherer:
        n_ranks, hosts, cohorts = self.options.ranks, self.options.hosts, self.options.cohorts
        host_R = self.ranks_R % hosts if self.options.scattered else self.ranks_R * hosts // n_ranks
        role_R = [f"role-{role}" if cohorts > 1 else "" for role in self.ranks_R * cohorts // n_ranks]
        info = RingInfo(0, n_ranks, 0, 0, "job", "", "", self.schema, 0, 0, 0, 0)
        rings = {n: replace(info, rank=n, host=f"host-{host_R[n]}", cohort=role_R[n]) for n in range(n_ranks)}
        gatherer = Gatherer(self.schema, n_ranks, self.shape)
        gatherer.take([Rows(0, self.schema, n_ranks, rings, decode([(0, b"")], self.schema))])
        return gatherer

    def steps(self) -> StepArrays:
        """The next step: arrival is what came after the last sync and before this one; then all leave together."""
        n_stages = len(self.schema.stages)
        jitter_SR = 1.0 + JITTER * self._random.standard_normal((n_stages, self.options.ranks))
        own_SR = self._own_S[:, None] * np.clip(jitter_SR, 0.5, None)
        own_SR[self.schema.stages.index(SLOW_STAGE), self.slow_rank] += SLOW_MS
        arrival_R = self._carried_R + own_SR[: self._sync].sum(axis=0)
        own_SR[self._sync] = arrival_R.max() - arrival_R + self._own_S[self._sync]
        self._carried_R = own_SR[self._sync + 1 :].sum(axis=0)
        slots_RW = np.zeros((self.options.ranks, DURATIONS + n_stages + 2), dtype=np.int64)
        slots_RW[:, STEP], slots_RW[:, BETWEEN], slots_RW[:, READY] = self.step, 0, UNKNOWN
        slots_RW[:, DURATIONS : DURATIONS + n_stages] = (own_SR * MS_NS).T
        self.step += 1
        shape = self.options.ranks, len(COUNTERS)
        counted_RC = self._random.exponential(COUNTED, shape) if self.options.counted else None
        return StepArrays(self.schema, self.ranks_R, slots_RW, counted_RC)


def seconds(act: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = act()
    return time.process_time() - began, result


def next_window(job: Job, gatherer: Gatherer) -> tuple[Window, list[float]]:
    """Feed steps until a window comes out; the time that each of them took."""
    taken = []
    while True:
        steps = job.steps()
        add_s, _ = seconds(lambda steps=steps: gatherer.add(steps))
        ready_s, windows = seconds(gatherer.ready)
        taken.append(add_s + ready_s)
        if windows:
            return windows[0], taken


def timed(options: argparse.Namespace) -> tuple[dict[str, float], Verdict]:
    job = Job(options)
    gatherer, past = job.gatherer(), None
    found: dict[str, list[float]] = {"pass": [], "accounting": [], "judge": [], "step": [], "step_and_cut": []}
    # The first window warms everything up, and gives the judge a past.
    window, _ = next_window(job, gatherer)
    verdict, past = judge(window, past, Settings())
    for _ in range(options.rounds):
        window, steps_s = next_window(job, gatherer)
        found["step"] += steps_s[:-1]
        found["step_and_cut"].append(steps_s[-1])
        for _ in range(3):
            found["pass"].append(seconds(window.durations_NRS.max)[0])
        found["accounting"].append(seconds(lambda window=window: anchored(window))[0])
        judge_s, (verdict, past) = seconds(lambda window=window, past=past: judge(window, past, Settings()))
        found["judge"].append(judge_s)
    median = {name: statistics.median(times) for name, times in found.items() if times}
    # With a window after every step there is no step without one.
    plain_s, cut_s = median.pop("step", 0.0), median.pop("step_and_cut")
    median["ingest_step"] = (plain_s * (options.stride - 1) + cut_s) / options.stride
    return median, verdict


def remembered(options: argparse.Namespace) -> dict[str, float]:
    """Bytes: what the store keeps, what it needs at its worst with one window handed out, and what judging adds."""
    job = Job(options)
    tracemalloc.start()
    gatherer, window, past = job.gatherer(), None, None
    store_peak = judge_peak = 0
    for _ in range(options.window + 2 * options.stride):
        steps = job.steps()
        # The batch is its sender's, and the window before was dropped when it had been judged.
        window = None
        others = steps.slots_BW.nbytes
        tracemalloc.reset_peak()
        gatherer.add(steps)
        for window in gatherer.ready():
            store_peak = max(store_peak, tracemalloc.get_traced_memory()[1] - others)
            held, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            _, past = judge(window, past, Settings())
            judge_peak = max(judge_peak, tracemalloc.get_traced_memory()[1] - held)
    del window, steps
    store = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {"store": store, "store_and_window_peak": store_peak, "judge_peak": judge_peak}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    sizes = [options.window, options.stride, options.hosts, options.cohorts, options.rounds]
    if options.ranks < 2 or not 3 <= options.stages <= 32 or min(sizes) < 1:
        raise SystemExit("at least 2 ranks, 3 to 32 stages, and 1 of everything else")
    window_bytes = options.window * options.ranks * options.stages * 8
    start_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times, verdict = timed(options)
    # ru_maxrss is KiB on Linux.
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    first = verdict.suspects[0] if verdict.suspects else None
    ingest_s, judge_s = times["ingest_step"], times["judge"]
    return {
        **{name: value for name, value in vars(options).items() if name not in ("json", "quick")},
        "numpy": np.__version__,
        "window_bytes": window_bytes,
        **{f"{name}_ms": round(times[name] * 1e3, 3) for name in ("pass", "accounting", "judge")},
        **{f"{name}_over_pass": round(times[name] / times["pass"], 2) for name in ("accounting", "judge")},
        "ingest_ms_a_step": round(ingest_s * 1e3, 3),
        "ingest_over_pass": round(ingest_s / (times["pass"] / options.window), 2),
        "ms_a_step": round((ingest_s + judge_s / options.stride) * 1e3, 3),
        **{f"{name}_windows": round(size / window_bytes, 2) for name, size in remembered(options).items()},
        "process_peak_bytes": peak_kib * 1024,
        "process_peak_windows": round((peak_kib - start_kib) * 1024 / window_bytes, 2),
        "planted": {"rank": options.ranks // 3, "stage": SLOW_STAGE, "ms": SLOW_MS},
        "label": verdict.label,
        "reasons": list(verdict.reasons),
        "suspect": None if first is None else {"rank": first.rank, "stage": first.stage, "gain_ms": first.gain_s * 1e3},
    }
