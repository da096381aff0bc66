"""Captures as a trainer makes them of itself: from a request to a trace in the spool, step by step.

Requests come from, and results go to, a `sftriage.recorder.mailbox.Mailbox`.
Standard library only, and what runs in a trainer: see `sftriage.recorder`.
"""
