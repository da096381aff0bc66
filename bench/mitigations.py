"""What two ways to live with a straggler win, on links of known speed, beside what their models say.

    python bench/mitigations.py [--ranks N ...] [--rounds N] [--only PART ...] [--json]

All-reduce around a late rank (StragglAR) against one in a ring, over how late it is, in units of what the whole message
takes on a link (sβ): seconds from where it is there. A pipeline of four stages over the delay of its middle link, in
units of a forward computation: torch's own 1F1B, 1F1B whose sends hold nothing up, and stages as far ahead as planned.
The same where a slow link holds its sender up: torch's own 1F1B, stages as far ahead as planned, and these once what
they send leaves from the host. And a whole job with a slow link under triage, whose policy allows nothing, and allows
that its stages run further ahead: how long it takes, with its trial, and what is on record of that. And what it takes a
rank to begin a backward that StragglAR may be switched on in: on one host, and on several, where ranks vote.

Ranks are processes, and messages go over Gloo, held back for what the links take; computations sleep. So both are of
the links and the schedules, and not of this machine's cores, whose share comes on top. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from sftriage.mitigate.advice import Link, under_straggler
from sftriage.mitigate.pipelines import Pipeline, blocked, one_f_one_b, planned, step_s
from tests.integration.remedies import POLICY

TESTS = Path(__file__).parents[1] / "tests"
LAUNCH = TESTS / "integration" / "jobs" / "launch.py"
LATE_RANK = Path(__file__).parent / "mitigations_parts" / "late_rank.py"
VOTES = Path(__file__).parent / "mitigations_parts" / "votes.py"
WATCHED = TESTS / "integration" / "jobs" / "slow_link.py"
PIPELINE = TESTS / "integration" / "jobs" / "delayed_pipeline.py"

SIZE_BYTES, WHOLE_S = 1 << 20, 0.2
"""A message, and what it takes on a link."""
DELAYS = (0.0, 0.25, 0.5, 0.75, 1.0, 2.0, 4.0)
STAGES, MICROBATCHES, FORWARD_S, BACKWARD_S = 4, 16, 0.02, 0.04
LINK_DELAYS = (0.0, 0.5, 1.0, 2.0, 4.0)
HELD_DELAYS = (0.0, 0.5, 1.0, 2.0)
LOOP_SPEC = {"forward_s": 0.006, "backward_s": 0.012, "microbatches": 8, "most": 8, "steps": 200}
LOOP_DELAY_S = 0.02
VOTE_SPEC = {"hosts": 2, "step_s": 0.01}
VOTERS, STEPS_A_ROUND = 4, 200
MITIGATE = "  mitigate: {remedies: [pipeline], steps: 8}\n"


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
HELD = ("one_f_one_b_held", "ahead_held", "from_host")


def told_by(ranks: int, job: Path, spec: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, str(LAUNCH), str(ranks), str(job), json.dumps(spec)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{job.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return list(json.loads(done.stdout))


def around_a_late_rank(ranks: int, rounds: int) -> dict[str, Any]:
    link = Link(0.0, WHOLE_S / SIZE_BYTES)
    model = under_straggler(ranks, SIZE_BYTES, link)
    delays_s = [WHOLE_S * delay for delay in DELAYS]
    spec = {"size_bytes": SIZE_BYTES, "latency_s": link.latency_s, "s_per_byte": link.s_per_byte}
    curve = []
    for point in told_by(ranks, LATE_RANK, {**spec, "delays_s": delays_s, "rounds": rounds}):
        delay_s = point["delay_s"]
        measured = {f"{name}_s": statistics.median(point[name]) for name in ("ring", "stragglar")}
        curve.append(
            {
                "delay_s": delay_s,
                **measured,
                "ring_model_s": model.ring_s,
                "stragglar_model_s": model.exposed_s(delay_s),
            }
        )
    return {"ranks": ranks, "whole_message_s": WHOLE_S, "break_even_s": model.break_even_s, "curve": curve}


def under_a_slow_link(rounds: int) -> dict[str, Any]:
    curve = []
    for delay in LINK_DELAYS:
        delays = (0.0, delay * FORWARD_S, 0.0)
        pipeline = Pipeline((FORWARD_S,) * STAGES, (BACKWARD_S,) * STAGES, delays, MICROBATCHES)
        usual, ahead = one_f_one_b(pipeline), planned(pipeline)
        spec = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "delay_S": delays, "microbatches": MICROBATCHES}
        # The first step of each schedule sets up what the others have.
        steps = told_by(STAGES, PIPELINE, {**spec, "rounds": ["1F1B", usual, *(["1F1B", usual, ahead] * rounds)]})
        of = [statistics.median(one["step_s"] for one in steps[2 + which : -1 : 3]) for which in range(3)]
        models = {
            "one_f_one_b_model_s": step_s(pipeline, usual),
            "adapted_model_s": step_s(pipeline, ahead),
            "ideal_s": step_s(pipeline.undelayed, usual),
        }
        curve.append(
            {
                "delay_s": delays[1],
                "ahead": ahead,
                "torchs_1f1b_s": of[0],
                "one_f_one_b_s": of[1],
                "adapted_s": of[2],
                **models,
            }
        )
    return {"stages": STAGES, "microbatches": MICROBATCHES, "forward_s": FORWARD_S, "curve": curve}


def where_a_link_holds_up(rounds: int) -> dict[str, Any]:
    curve = []
    for delay in HELD_DELAYS:
        delays = (0.0, delay * FORWARD_S, 0.0)
        pipeline = Pipeline((FORWARD_S,) * STAGES, (BACKWARD_S,) * STAGES, delays, MICROBATCHES)
        usual, ahead = one_f_one_b(pipeline), planned(pipeline)
        spec = {"forward_s": FORWARD_S, "backward_s": BACKWARD_S, "delay_S": delays, "microbatches": MICROBATCHES}
        took = {}
        for how in ("held", "host"):
            # (the first step of each schedule sets up what the others have)
            several = {**spec, "transfers": how, "rounds": ["1F1B", ahead, *(["1F1B", ahead] * rounds)]}
            steps = told_by(STAGES, PIPELINE, several)
            took[how] = [statistics.median(one["step_s"] for one in steps[2 + which : -1 : 2]) for which in range(2)]
        curve.append(
            {
                "delay_s": delays[1],
                "ahead": ahead,
                "one_f_one_b_held_s": took["held"][0],
                "ahead_held_s": took["held"][1],
                "from_host_s": took["host"][1],
                "one_f_one_b_held_model_s": step_s(blocked(pipeline), usual),
                "ahead_held_model_s": step_s(blocked(pipeline), ahead),
                "from_host_model_s": step_s(pipeline, ahead),
            }
        )
    return {"stages": STAGES, "microbatches": MICROBATCHES, "forward_s": FORWARD_S, "curve": curve}


def in_the_loop() -> dict[str, Any]:
    found: dict[str, Any] = {"delay_s": LOOP_DELAY_S, **LOOP_SPEC}
    for name, policy in (("alone_s", POLICY), ("mitigated_s", POLICY + MITIGATE)):
        with TemporaryDirectory() as scratch:
            delays, run = Path(scratch) / "delays", Path(scratch) / "run"
            delays.write_text(json.dumps([0.0, LOOP_DELAY_S, 0.0]))
            (Path(scratch) / "policy.yaml").write_text(policy)
            command = [sys.executable, "-m", "sftriage", "run", "--policy", f"{scratch}/policy.yaml", "--out", str(run)]
            job = [sys.executable, str(LAUNCH), "4", str(WATCHED), json.dumps({**LOOP_SPEC, "delays": str(delays)})]
            began_s = time.monotonic()
            subprocess.run([*command, "--", *job], env=ENVIRONMENT, capture_output=True, check=True)
            found[name] = time.monotonic() - began_s
            lines = map(json.loads, (run / "decisions.jsonl").read_text().splitlines())
            found["remedies"] = [one for one in lines if one.get("type") == "remedy"]
    return found


def what_a_vote_takes(rounds: int) -> dict[str, Any]:
    """Medians over all ranks and backwards: with a vote, and without, and by their share in both."""
    took = told_by(VOTERS, VOTES, {**VOTE_SPEC, "steps": STEPS_A_ROUND * rounds})
    of = {name: statistics.median(us for rank in took for us in rank["took_us"][name]) for name in took[0]["took_us"]}
    share = statistics.mean(rank["votes"] / len(rank["took_us"]["several"]) for rank in took)
    several_us = of["each_round"] * share + of["several"] * (1.0 - share)
    told = {"one_host_us": of["one_host"], "without_vote_us": of["several"], "with_vote_us": of["each_round"]}
    return {
        "ranks": VOTERS,
        **VOTE_SPEC,
        **told,
        "votes_share": share,
        "several_hosts_us": several_us,
        "ratio": several_us / of["one_host"],
    }


def shown(found: dict[str, Any]) -> None:
    for one in found.get("late_rank", ()):
        even = "never" if one["break_even_s"] is None else f"at {one['break_even_s']:.3f} s"
        print(f"{one['ranks']} ranks, a message of {one['whole_message_s']} s; by the model StragglAR pays {even}")
        print("  late by  ring (model)        StragglAR (model)")
        for at in one["curve"]:
            ring = f"{at['ring_s']:.3f} s ({at['ring_model_s']:.3f})"
            print(f"  {at['delay_s']:5.2f} s  {ring:18}  {at['stragglar_s']:.3f} s ({at['stragglar_model_s']:.3f})")
    if one := found.get("slow_link"):
        print(f"{one['stages']} stages, {one['microbatches']} microbatches, a forward of {one['forward_s']} s")
        print("  delay    torch's 1F1B  1F1B (model)      ahead (model)     without delay")
        for at in one["curve"]:
            usual = f"{at['one_f_one_b_s']:.2f} s ({at['one_f_one_b_model_s']:.2f})"
            adapted = f"{at['adapted_s']:.2f} s ({at['adapted_model_s']:.2f})"
            own = f"{at['torchs_1f1b_s']:.2f} s"
            print(f"  {at['delay_s']:.2f} s   {own:12}  {usual:16}  {adapted:16}  {at['ideal_s']:.2f} s")
    if one := found.get("held_up"):
        print("link that holds its sender up: 1F1B (model)  ahead (model)     ahead, from the host (model)")
        for at in one["curve"]:
            told = (f"{at[f'{name}_s']:.2f} s ({at[f'{name}_model_s']:.2f})" for name in HELD)
            print(f"  {at['delay_s']:.2f} s   {'  '.join(told)}")
    if one := found.get("votes"):
        print(f"{one['ranks']} ranks that begin a backward: {one['one_host_us']:.1f} us on one host")
        several, vote, without = (
            f"{one[name]:.1f} us" for name in ("several_hosts_us", "with_vote_us", "without_vote_us")
        )
        print(f"  on {one['hosts']} {several}", end="")
        print(f" ({without}, and {vote} with a vote, in {one['votes_share']:.1%}): {one['ratio']:.2f} times as long")
    if one := found.get("loop"):
        print(
            f"{one['steps']} steps with a link of {one['delay_s']} s: {one['alone_s']:.1f} s under triage alone, ",
            end="",
        )
        print(f"{one['mitigated_s']:.1f} s where stages may run further ahead; on record:")
        for told in one["remedies"]:
            print(f"  {told['state']}: {told['numbers']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=("late_rank", "slow_link", "held_up", "loop", "votes"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "late_rank": lambda: [around_a_late_rank(ranks, options.rounds) for ranks in options.ranks],
        "slow_link": lambda: under_a_slow_link(options.rounds),
        "held_up": lambda: where_a_link_holds_up(options.rounds),
        "loop": in_the_loop,
        "votes": lambda: what_a_vote_takes(options.rounds),
    }
    found = {"machine": {"cpus": os.cpu_count(), "system": platform.platform()}}
    found |= {name: part() for name, part in parts.items() if name in (options.only or parts)}
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        shown(found)


if __name__ == "__main__":
    main()
