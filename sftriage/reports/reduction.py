"""How a reduction, its agreement with the signal, and findings are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from sftriage.reports.tables import titled
from sftriage.traces.manifest import Findings
from sftriage.words.amounts import milliseconds
from sftriage.words.captures import caused
from sftriage.words.verdicts import verdict_sentence

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from sftriage.reduce.stages import Reduction
    from sftriage.reduce.together import Agreement
    from sftriage.runtime.reducing import Confirmation

ORIGINS = {
    "sftriage": "marked by sftriage",
    "names": "told by the names of the field",
    "map": "told by the map of names",
}


def trace_values(one: Reduction) -> dict[str, Any]:
    """A reduction as JSON values."""
    trace, steps = one.trace, one.steps
    return {
        "source": trace.source,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "job": trace.job,
        "capture_id": trace.capture_id,
        "origin": one.origin,
        "stages": one.schema.stages,
        "sync": one.schema.sync,
        "steps": steps.number_N.tolist(),
        "start_ns": steps.start_N.tolist(),
        "step_ns": (steps.end_N - steps.start_N).tolist(),
        "durations_ns": one.durations_ns_NS.tolist(),
        "mean_s": one.mean_s,
        "absolute": trace.absolute,
        "notes": one.notes,
    }


def stages_table(one: Reduction) -> Table:
    """What each stage of a trace took."""
    steps = one.steps
    whose = "a trace of no known rank" if one.trace.rank is None else f"rank {one.trace.rank}"
    title = f"Stages of {whose}, steps {steps.number_N[0]} to {steps.number_N[-1]}, {ORIGINS[one.origin]}"
    caption = {"caption": one.trace.source, "caption_justify": "left"}
    table = titled(title, ["stage"], ["mean", "least", "most", "share"], **caption)
    lasts_N = steps.end_N - steps.start_N
    for stage, its_N in zip(one.schema.stages, one.durations_ns_NS.T, strict=True):
        name = f"{stage} (sync)" if stage in one.schema.sync else stage
        table.add_row(name, *_times(its_N), f"{its_N.mean() / lasts_N.mean():.0%}")
    table.add_section()
    table.add_row("step", *_times(lasts_N), "100%")
    return table


def _times(ns_N: NDArray[Any]) -> list[str]:
    return [milliseconds(float(value) * 1e-9) for value in (ns_N.mean(), ns_N.min(), ns_N.max())]


def agreement_table(agreement: Agreement) -> Table:
    """Trace against signal, stage by stage."""
    title = f"Rank {agreement.rank}, trace against signal, steps {agreement.first_step} to {agreement.last_step}"
    table = titled(title, ["stage"], ["trace", "signal", "difference", "allowed"])
    table.add_column("agrees")
    for one in agreement.stages:
        times = (milliseconds(one.trace_s), milliseconds(one.signal_s), f"{one.difference_s * 1e3:+.2f} ms")
        table.add_row(
            one.stage, *times, milliseconds(one.allowed_s), Text("yes") if one.agrees else Text("no", "bold red")
        )
    return table


def confirmation_sentence(confirmation: Confirmation) -> str:
    """Whether the heavy trace agrees with the coarse signal."""
    parts = []
    for agreement in confirmation.ranks:
        off = [one for one in agreement.stages if not one.agrees]
        asked = next((one for one in agreement.stages if one.stage == agreement.stage), None)
        said = f"rank {agreement.rank}: {agreement.agrees}"
        if asked is not None:
            said += f", {asked.stage} {milliseconds(asked.trace_s)} against {milliseconds(asked.signal_s)}"
        if off:
            said += f"; apart: {', '.join(f'{one.stage} {one.difference_s * 1e3:+.1f} ms' for one in off)}"
        parts.append(said)
    if confirmation.verdict is not None:
        same = "the same" if confirmation.verdicts_agree else f"another: {verdict_sentence(confirmation.verdict)}"
        parts.append(f"the signal's verdict on these steps is {same}")
    return f"agrees: {confirmation.agrees} ({'; '.join(parts)})"


def shares_table(findings: Findings) -> Table:
    """What took the suspect stage's time, as self time."""
    rank = "" if findings.suspect.rank is None else f" of rank {findings.suspect.rank}"
    beside = "control" if findings.beside == "rank" else "other steps"
    numbers = ["self", beside, "calls"] if findings.control else ["self", "calls"]
    table = titled(f"What filled {findings.stage}{rank}, self time a step", ["name", "what"], numbers)
    table.columns[0].overflow = "fold"
    for share in findings.shares:
        control = [] if findings.control is None else [milliseconds(share.control_self_s or 0.0)]
        what = f"{share.kind}, waits" if share.waits else share.kind
        calls = f"{share.calls:.1f}" if share.calls else ""
        table.add_row(share.name, what, milliseconds(share.self_s), *control, calls)
    return table


def finding_lines(findings: Findings) -> list[str]:
    """Findings in lines: the summary, and the device's side where there is one."""
    cause = findings.cause
    lines = [findings.summary]
    if cause is not None:
        lines = [caused(cause), cause.next_step, findings.summary]
    suspect = findings.suspect
    if suspect.kernels or suspect.launches:
        lines.append(
            f"device: {suspect.kernels:.0f} kernels a step, {milliseconds(suspect.device_s)} of work "
            f"({milliseconds(suspect.collective_s)} in collectives), from {suspect.launches:.0f} launches "
            f"that took the host {milliseconds(suspect.launch_s)}"
        )
    most = [one for one in findings.kernels[:3] if one.device_s >= max(5e-5, 0.05 * suspect.device_s)]
    if most:
        lines.append(f"on the device: {', '.join(f'{one.words} {milliseconds(one.device_s)}' for one in most)}")
    return lines
