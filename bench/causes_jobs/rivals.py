"""What other tools say of a slow rank's trace, and of another rank's in the same steps: run by a Python that has them.

PYTHON rivals.py SUSPECT.json.gz CONTROL.json.gz
"""

import json
import logging
import sys
import warnings
from collections.abc import Callable
from typing import Any


def hta(suspect: str, control: str) -> dict[str, Any]:
    """Holistic Trace Analysis: its analyses of why, and what took longer on the one rank, by the name of an event."""
    from hta.trace_analysis import TraceAnalysis
    from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff

    analysis = TraceAnalysis(trace_files=[suspect, control], trace_dir="/", include_last_profiler_step=True)
    steps = [int(step) for step in analysis.get_profiler_steps()]
    slow, other = sorted(analysis.t.trace_files, key=lambda rank: analysis.t.trace_files[rank] != suspect)
    one, its = LabeledTrace("slow", analysis.t), LabeledTrace("other", analysis.t)
    found: dict[str, Any] = {}
    looks: dict[str, Callable[[], Any]] = {
        "temporal breakdown": lambda: analysis.get_temporal_breakdown(visualize=False).to_string(),
        "idle time": lambda: str(analysis.get_idle_time_breakdown(visualize=False)),
        "stragglers": lambda: str(analysis.get_potential_stragglers()),
        "critical path": lambda: str(analysis.critical_path_analysis(slow, "ProfilerStep", 0)[1]),
    }
    for name, look in looks.items():
        try:
            found[name] = look()[:200]
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[:200]
    compared = TraceDiff.compare_traces(its, one, other, slow, steps, steps, DeviceType.CPU)
    longest = compared.sort_values("diff_duration", ascending=False)["diff_duration"][:4]
    found["took longer"] = [f"{name} +{us / 1e3 / len(steps):.1f} ms a step" for name, us in longest.items()]
    return found


def tracelens(suspect: str, _: str) -> dict[str, Any]:
    """TraceLens (AMD): its report on a PyTorch trace."""
    from TraceLens import TreePerfAnalyzer

    analyzer = TreePerfAnalyzer.from_file(suspect)
    return {"gpu timeline": analyzer.get_df_gpu_timeline().to_string()[:400]}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    said = {}
    for name, look in (("HTA", hta), ("TraceLens", tracelens)):
        try:
            said[name] = look(*sys.argv[1:])
        except Exception as error:
            said[name] = {"error": f"{type(error).__name__}: {error}"[:300]}
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
