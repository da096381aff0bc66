"""The demo: a real training job, and faults to inject. `sftriage demo` runs it; neither uses sftriage's verdicts."""
