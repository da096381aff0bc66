"""Captures as a trainer makes them of itself: from a request to a trace in the spool, step by step.

It knows of no ring: requests come from, and results go to, whatever is a `sftriage.profiling.executor.Requests`.
Standard library only, and what runs in a trainer: see `sftriage.recorder`.
"""
