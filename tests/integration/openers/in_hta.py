"""``in_hta.py TRACE...``: opens traces with Holistic Trace Analysis and prints, as JSON, what it makes of them."""

import json
import sys

from hta.trace_analysis import TraceAnalysis
from hta.trace_diff import DeviceType, LabeledTrace, TraceDiff


def main() -> None:
    # (a list: HTA finds the ranks in the files; and it leaves out the last step unless it is told not to)
    analysis = TraceAnalysis(trace_files=sys.argv[1:], trace_dir="/", include_last_profiler_step=True)
    traces = analysis.t
    names = traces.symbol_table.get_sym_table()
    rows = {rank: traces.get_trace(rank) for rank in sorted(traces.trace_files)}
    steps = [int(step) for step in analysis.get_profiler_steps()]
    found = {
        "files": {rank: traces.trace_files[rank] for rank in rows},
        "steps": steps,
        "names": {rank: [names[one] for one in row["name"]] for rank, row in rows.items()},
        "metadata": {rank: traces.meta_data[rank] for rank in rows},
        "overlap": analysis.get_comm_comp_overlap(visualize=False)["rank"].tolist(),
    }
    first, *others = rows
    if others:
        one, other = LabeledTrace("one", traces), LabeledTrace("other", traces)
        compared = TraceDiff.compare_traces(one, other, first, others[0], steps, steps, DeviceType.CPU)
        found["diff_us"] = {str(name): float(us) for name, us in compared["diff_duration"].items()}
    json.dump(found, sys.stdout, default=str)


if __name__ == "__main__":
    main()
