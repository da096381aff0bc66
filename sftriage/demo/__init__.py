"""The demo: a real job, and the faults that can be injected. Neither knows of sftriage's verdicts."""
