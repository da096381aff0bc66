"""Who names the slow rank, when, at which cost: sftriage, its peers and plain rules on the same jobs with faults.

Each row is one training job (DDP over Gloo, `jobs/compared.py`) with one fault drawn from the seed, which every tool
watches in turn, in random order, as its documentation says (`peers.py`). A tool that cannot run without a GPU, and the
plain rules (`rivals.py`), judge the windows that sftriage recorded instead: ``rule only``. A row takes about two
minutes. Ctrl-C ends it with the rows so far.

right     named the rank and the stage at fault; of a slow host, the rank.
part      named the rank, with no stage or another one.
wrong     named only ranks that are not at fault. A tool that names more than one rank counts by its best name, and the
          others count as false names.
nothing   named no rank.
failed    the job did not end well with it.

The steps in a cell are those from the first with the fault to the one in which the name was there to read.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.crew import RowFailedError
from bench.estimates import ratio
from bench.jobs.compared import STAGES_S, Plan
from bench.peers import RESILIENCY, TOOLS, Name, Ran, installed, refusal, watch
from bench.rivals import RULES, says
from bench.rows import STRIDE_STEPS, WARMUP_STEPS, WINDOW_STEPS, Deck
from bench.runner import say
from sftriage.runs.recordings import load_recording
from sftriage.windows.gather import Shape

NVRX = "nvidia-resiliency-ext"
BY_RULE = {NVRX: "own speed 0.75"} | {
    name: name for name in ("per-stage maximum", "per-stage average", "median deviation")
}
"""Tools that judge recorded windows, and the rule of each."""
NAMED = tuple(name for name in TOOLS if name != "bare")
FAULTS: dict[str, str | None] = {
    "batch": "data",
    "forward": "forward",
    "backward": "backward",
    "optimizer": "optimizer",
    "host": None,
    "stall": "data",
    "hang": "forward",
}
"""Faults, and their stage; the host is slow in all of them."""
CONTROLS = ("healthy", "healthy again")
DID = ("right", "part", "wrong", "nothing", "failed")
HANG_S = 20.0
SETTLED = 20
"""The first step that counts for the cost: before it, tools and torch warm up."""
QUICK = {"only": ["batch"], "tools": ["sftriage", "median deviation"], "steps": 160}
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "sftriage-bench"


def arguments(parser: argparse.ArgumentParser) -> None:
    every = (*FAULTS, *CONTROLS)
    parser.add_argument("--only", nargs="+", choices=every, default=every, metavar="FAULT", help=", ".join(every))
    names = (*NAMED, *BY_RULE)
    parser.add_argument("--tools", nargs="+", choices=names, default=names, metavar="TOOL", help=", ".join(names))
    parser.add_argument("--rounds", type=int, default=1, help="rows of each fault")
    parser.add_argument("--ranks", type=int, default=4, help="processes of each job, from 2")
    parser.add_argument("--steps", type=int, default=260, help="steps of each job, from 160")
    parser.add_argument("--seed", type=int, default=0, help="what the faults are drawn from")
    parser.add_argument("--environments", type=Path, default=CACHE, help="where peers are installed")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep what the tools wrote")


def drawn(fault: str, options: argparse.Namespace, rng: random.Random, ranks: Deck[int]) -> Plan:
    """A job with this fault, without a tool yet."""
    plan = Plan("bare", "", options.steps, rng.randrange(1 << 30), onset=rng.randrange(80, 100))
    if fault in CONTROLS:
        return plan
    more_s, busy = rng.uniform(0.3, 0.9) * sum(STAGES_S.values()), rng.random() < 0.5
    plan = replace(plan, rank=ranks.deal(), stage=FAULTS[fault], more_s=more_s, busy=busy)
    if fault == "stall":
        return replace(plan, more_s=10 * more_s, every=rng.randrange(10, 20), busy=False)
    return replace(plan, more_s=HANG_S, last=plan.onset + 1, busy=False) if fault == "hang" else plan


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tool made of one row. ``after_steps`` and ``after_s`` belong to the first of its best names."""

    tool: str
    did: str
    named: tuple[int, str | None] | None = None
    after_steps: int | None = None
    after_s: float | None = None
    at_end: bool = False
    false_names: tuple[int, ...] = ()


def did_of(name: Name, plan: Plan) -> str:
    if name.rank != plan.rank or name.step < plan.onset:
        return "wrong"
    return "right" if plan.stage in (name.stage, None) else "part"


def outcome(tool: str, names: Sequence[Name], plan: Plan, onset_s: float | None = None) -> Outcome:
    """The best of a tool's names, in the order of time, and the ranks that it named without their fault."""
    did = [did_of(name, plan) for name in names]
    best = next((one for one in DID if one in did), "nothing")
    false_names = tuple(sorted({name.rank for name, one in zip(names, did, strict=True) if one == "wrong"}))
    if best not in ("right", "part"):
        return Outcome(tool, best, false_names=false_names)
    first = names[did.index(best)]
    after_s = None if first.time_s is None or onset_s is None else first.time_s - onset_s
    at_end = first.time_s is not None and first.step >= plan.steps
    named = first.rank, first.stage
    return Outcome(tool, best, named, first.step - plan.onset + 1, after_s, at_end, false_names)


def by_rule(rule: str, run: Path) -> list[Name]:
    """What a rule names in each window of a recorded run for which it raises an alarm."""
    windows = list(load_recording(run).windows(Shape(WINDOW_STEPS, STRIDE_STEPS, WARMUP_STEPS)))
    names = []
    for index, window in enumerate(windows):
        answer = says(RULES[rule], windows[: index + 1])
        if answer.alarm:
            names.append(Name(answer.ranked[0].rank, answer.ranked[0].stage, window.last_step))
    return names


def one_row(
    fault: str, plan: Plan, options: argparse.Namespace, pythons: Mapping[str, Path], folder: Path
) -> dict[str, Any]:
    """Every tool on one job."""
    rules = [name for name in BY_RULE if name in options.tools]
    order = [name for name in TOOLS if name in options.tools or name == "bare" or (name == "sftriage" and rules)]
    random.Random(plan.seed).shuffle(order)
    ran: dict[str, Ran] = {}
    outcomes: list[Outcome] = []
    for name in order:
        try:
            ran[name] = watch(name, plan, options.ranks, folder / name, pythons[name])
        except RowFailedError as error:
            say(str(error))
    for name in (name for name in NAMED if name in options.tools):
        one = ran.get(name)
        onset_s = one and one.ended_s[plan.onset - 1]
        outcomes.append(outcome(name, one.names, plan, onset_s) if one else Outcome(name, "failed"))
    for name in rules:
        recorded = "sftriage" in ran
        names = by_rule(BY_RULE[name], folder / "sftriage" / "run") if recorded else []
        outcomes.append(outcome(name, names, plan) if recorded else Outcome(name, "failed"))
    for one in sorted(outcomes, key=lambda one: list(options.tools).index(one.tool)):
        named = "" if one.named is None else f"rank {one.named[0]}, {one.named[1]}"
        say(f"    {one.tool:24}{cell(asdict(one)):20}{named}")
    return {
        "fault": fault,
        "plan": asdict(plan),
        "outcomes": {one.tool: asdict(one) for one in outcomes},
        "costs": {name: cost(one, plan) for name, one in ran.items()},
    }


def cost(ran: Ran, plan: Plan) -> dict[str, float]:
    healthy_s = [after - before for before, after in zip(ran.ended_s, ran.ended_s[1 : plan.onset], strict=False)]
    return {
        "step_s": statistics.median(healthy_s[SETTLED:]),
        "cpu_s": ran.cpu_s,
        "peak_bytes": ran.peak_bytes,
        "written_bytes": ran.written_bytes,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    if options.ranks < 2 or options.steps < 160:
        raise SystemExit("from 2 ranks and 160 steps on")
    pythons = {
        name: installed(tool.requirements, options.environments)
        for name, tool in TOOLS.items()
        if name in (*options.tools, "bare", "sftriage")
    }
    refused = refusal(installed(RESILIENCY, options.environments)) if NVRX in options.tools else ""
    rng = random.Random(options.seed)
    ranks = Deck(range(options.ranks), rng)
    rows = []
    with tempfile.TemporaryDirectory(prefix="compare-") as scratch, suppress(KeyboardInterrupt):
        for number in range(options.rounds):
            for fault in options.only:
                plan = drawn(fault, options, rng, ranks)
                say(f"{fault}: {words(asdict(plan))}")
                folder = (options.keep or Path(scratch)) / f"{fault.replace(' ', '-')}-{number}"
                rows.append(one_row(fault, plan, options, pythons, folder))
    tools = [name for name in (*NAMED, *BY_RULE) if name in options.tools]
    return {
        "seed": options.seed,
        "refused": refused,
        "tools": {name: summary(name, rows) for name in tools},
        "rows": rows,
    }


def summary(tool: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The counts of one tool, and its cost beside the bare job of the same row."""
    faults = [row["outcomes"][tool] for row in rows if row["fault"] in FAULTS]
    found: dict[str, Any] = {did: sum(one["did"] == did for one in faults) for did in DID}
    found["faults"] = len(faults)
    found["false_names"] = sum(len(one["false_names"]) for one in faults)
    controls = [row["outcomes"][tool] for row in rows if row["fault"] in CONTROLS]
    found |= {"controls": len(controls), "controls_with_a_name": sum(bool(one["false_names"]) for one in controls)}
    steps = [one["after_steps"] for one in faults if one["after_steps"] is not None]
    found["after_steps"] = statistics.median(steps) if steps else None
    if tool in TOOLS and any({tool, "bare"} <= row["costs"].keys() for row in rows):
        both = [row["costs"] for row in rows if {tool, "bare"} <= row["costs"].keys()]
        mine, bare = ([costs[name] for costs in both] for name in (tool, "bare"))
        found["step_ratio"] = ratio([one["step_s"] for one in mine], [one["step_s"] for one in bare])
        found |= {of: statistics.median(one[of] for one in mine) for of in ("cpu_s", "peak_bytes", "written_bytes")}
    return found


def words(plan: Mapping[str, Any]) -> str:
    if plan["rank"] is None:
        return "no fault"
    rest = ", busy" if plan["busy"] else ""
    rest += f", every {plan['every']} steps" if plan["every"] > 1 else ""
    where = plan["stage"] or "all stages"
    return f"rank {plan['rank']}, {where}, {1e3 * plan['more_s']:.0f} ms from step {plan['onset']} on{rest}"


def cell(outcome: Mapping[str, Any]) -> str:
    """An outcome in a table: ``right +31 (1 false)``."""
    when = " end" if outcome["at_end"] else f" +{outcome['after_steps']}" if outcome["after_steps"] is not None else ""
    false_names = len(outcome["false_names"])
    more = f" ({false_names} false)" if false_names and outcome["did"] != "wrong" else ""
    return f"{outcome['did']}{when}{more}"


def show(found: dict[str, Any]) -> Iterator[str]:
    tools, rows = found["tools"], found["rows"]
    yield from (f"{row['fault']:15}{words(row['plan'])}" for row in rows)
    yield ""
    yield from table(
        ["", *(row["fault"] for row in rows)],
        ([tool, *(cell(row["outcomes"][tool]) for row in rows)] for tool in tools),
    )
    yield ""
    heads = ["", *DID, "false", "controls", "after steps", "step / bare", "CPU s", "MiB", "KiB on disk"]
    yield from table(heads, ([tool, *figures(tool, of)] for tool, of in tools.items()))
    if found["refused"]:
        yield f"{NVRX} does not start here: {found['refused']}"


def figures(tool: str, of: Mapping[str, Any]) -> list[str]:
    """A tool's line in the last table."""
    cells = [
        *(str(of[did]) for did in DID),
        str(of["false_names"]),
        f"{of['controls_with_a_name']} of {of['controls']}",
    ]
    cells.append("" if of["after_steps"] is None else f"{of['after_steps']:.0f}")
    if "step_ratio" not in of:
        return [*cells, "rule only" if tool in BY_RULE else "", "", "", ""]
    sizes = of["peak_bytes"] / 2**20, of["written_bytes"] / 2**10
    return [*cells, of["step_ratio"].words(3), f"{of['cpu_s']:.1f}", *(f"{size:.0f}" for size in sizes)]


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    every = [heads, *lines]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    for line in every:
        yield "  ".join(
            one.ljust(width) if not at else one.rjust(width)
            for at, (one, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
