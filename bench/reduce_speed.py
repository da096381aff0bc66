"""How fast a heavy trace is reduced and in how much memory, against a plain pass over the same bytes.

A synthetic trace of that size is written to a temporary directory: steps with stages, operators nested as in a small
Transformer, runtime calls, kernels and the arrows between them, formatted as Kineto formats them. With --event-bytes
there are only operators in it, four to a nest, each written in about that many bytes (83 at the least), with
--unique-names each under a name of its own: what is kept of a trace depends on its events and names. Each round reduces
it in a process of its own (`sftriage reduce --json`), and passes over it in another that only reads (and unpacks) it
and counts brackets. The two are interleaved, so that a machine that slows down slows both; figures are medians of
processor time, memory is the largest resident size of the reducing process.
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench.runner import interleaved, used

PLAIN_PASS = """
import gzip, sys
path = sys.argv[1]
n = 0
with (gzip.open if path.endswith(".gz") else open)(path, "rb") as file:
    while piece := file.read(1 << 20):
        n += piece.count(b"},")
print(n)
"""
STAGES = ("data", "forward", "backward", "optimizer")
OPERATORS_A_STAGE = 400
HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [],
  "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1790857026000000000,
  "traceEvents": [
"""
EVENT = """  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {{
      "External id": {id},"Record function id": 0, "Ev Idx": {id}{more}
    }}
  }}"""
ARROW = """  {{
    "ph": "{ph}", "id": {id}, "pid": {pid}, "tid": {tid}, "ts": {ts:.3f},
    "cat": "ac2g", "name": "ac2g"{more}
  }}"""
NAMES = tuple(f"aten::{name}" for name in ("linear", "addmm", "view", "transpose", "layer_norm", "softmax", "copy_"))
KERNELS = tuple(f"void at::native::vectorized_elementwise_kernel<{n}, at::native::Functor>(int)" for n in range(40))


def step_text(number: int, start_us: float) -> tuple[str, float]:
    """One step: its events as text, and when it ends."""
    events: list[str] = []
    now = start_us + 5.0
    ids = number * 10_000

    def event(cat: str, name: str, ts: float, dur: float, tid: int = 71, pid: int = 71, more: str = "") -> None:
        nonlocal ids
        ids += 1
        events.append(EVENT.format(cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur, id=ids, more=more))

    for stage in STAGES:
        began = now
        for n in range(OPERATORS_A_STAGE):
            event("cpu_op", NAMES[n % len(NAMES)], now + 1, 20.0)
            event("cpu_op", NAMES[(n + 3) % len(NAMES)], now + 2, 15.0)
            correlation = f', "correlation": {ids}'
            event("cuda_runtime", "cudaLaunchKernel", now + 4, 5.0, more=correlation)
            event("kernel", KERNELS[n % len(KERNELS)], now + 30, 11.0, tid=7, pid=0, more=correlation)
            events.append(ARROW.format(ph="s", id=ids, pid=71, tid=71, ts=now + 4, more=""))
            events.append(ARROW.format(ph="f", id=ids, pid=0, tid=7, ts=now + 30, more=', "bp": "e"'))
            now += 22.0
        event("user_annotation", f"sftriage:{stage}", began, now - began)
    event("user_annotation", f"ProfilerStep#{number}", start_us, now + 3.0 - start_us)
    return ",\n".join(events), now + 3.0


OPERATORS_A_COMPACT_STAGE = 20_000
COMPACT = '{{"ph":"X","cat":"cpu_op","name":"{name}","pid":1,"tid":1,"ts":{ts:.2f},"dur":{dur}{more}}}'
COMPACT_MARK = '{{"ph":"X","cat":"user_annotation","name":"{name}","pid":1,"tid":1,"ts":{ts:.2f},"dur":{dur:.2f}}}'
FILLED = ',"args":{"filled":""}'


def compact_step_text(number: int, start_us: float, event_bytes: int, *, unique: bool) -> tuple[str, float]:
    """One step of nothing but operators of about that many bytes each: as text, and when it ends."""
    events: list[str] = []
    now, n = start_us + 5.0, number * OPERATORS_A_COMPACT_STAGE * len(STAGES)
    least = len(COMPACT.format(name="op1234567", ts=now, dur=3.5, more="")) + 2
    missing = event_bytes - least - len(FILLED)
    more = "" if missing < 0 else f"{FILLED[:-2]}{'x' * missing}{FILLED[-2:]}"
    for stage in STAGES:
        began = now
        for at in range(OPERATORS_A_COMPACT_STAGE):
            n += 1
            inner = at % 4
            ts, dur = (now + 0.25 + (inner - 1), 0.75) if inner else (now, 3.5)
            events.append(COMPACT.format(name=f"op{n if unique else n % 40}", ts=ts, dur=dur, more=more))
            now += 4.0 if inner == 3 else 0.0
        events.append(COMPACT_MARK.format(name=f"sftriage:{stage}", ts=began, dur=now - began))
    events.append(COMPACT_MARK.format(name=f"ProfilerStep#{number}", ts=start_us, dur=now + 3.0 - start_us))
    return ",\n".join(events), now + 3.0


def write_trace(
    path: Path, size_bytes: int, event_bytes: int | None = None, *, unique: bool = False
) -> tuple[int, int, int]:
    """Write a trace of about that size; its bytes before packing, its steps and its events."""
    events = 0

    def parts() -> Iterator[bytes]:
        nonlocal events
        yield HEAD.encode()
        written, number, now = 0, 100, 4_000_000.0
        while written < size_bytes:
            if event_bytes is None:
                text, now = step_text(number, now)
            else:
                text, now = compact_step_text(number, now, event_bytes, unique=unique)
            events += text.count('"ph"')
            now += 40.0
            piece = (",\n" if number > 100 else "").encode() + text.encode()
            written += len(piece)
            number += 1
            yield piece
        yield b'\n  ],\n  "traceName": "synthetic"\n}\n'

    total = steps = 0
    with gzip.open(path, "wb", compresslevel=1) if path.suffix == ".gz" else path.open("wb") as file:
        for piece in parts():
            file.write(piece)
            total += len(piece)
            steps += 1
    return total, steps - 2, events


QUICK = {"megabytes": 10, "rounds": 1}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=200, help="size of the trace's JSON")
    parser.add_argument("--event-bytes", type=int, help="only operators, each of about this many bytes")
    parser.add_argument("--unique-names", action="store_true", help="with --event-bytes: a name of its own for each")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gzip", action="store_true", help="pack the trace")
    parser.add_argument("--directory", help="where to write it (default: the system's temporary directory)")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.unique_names and options.event_bytes is None:
        raise SystemExit("--unique-names goes with --event-bytes")
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        path = Path(scratch) / ("trace.json.gz" if options.gzip else "trace.json")
        size = options.megabytes * 1_000_000
        size_bytes, steps, events = write_trace(path, size, options.event_bytes, unique=options.unique_names)
        commands = {"reduce": ("-m", "sftriage", "reduce", str(path), "--json"), "plain": ("-c", PLAIN_PASS, str(path))}
        took = interleaved({name: partial(used, *command) for name, command in commands.items()}, options.rounds)
    seconds = {name: statistics.median(one.cpu_s for one in of) for name, of in took.items()}
    ratio = statistics.median(one.cpu_s / plain.cpu_s for one, plain in zip(*took.values(), strict=True))
    return {
        "json_mb": round(size_bytes / 1e6, 1),
        "gzip": options.gzip,
        "steps": steps,
        "events": events,
        "unique_names": options.unique_names,
        "rounds": options.rounds,
        "reduce_mb_per_s": round(size_bytes / 1e6 / seconds["reduce"], 1),
        "plain_mb_per_s": round(size_bytes / 1e6 / seconds["plain"], 1),
        "reduce_over_plain": round(ratio, 2),
        "peak_rss_mb": round(max(one.peak_mb for one in took["reduce"]), 1),
    }
