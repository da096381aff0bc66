"""Puts the parts together: a job on this host with its agent and controller. Nothing here knows a command line.

`local` starts a job, or takes one over, with `triage` beside it, in a loop. `uploads` and `indexing` are sinks.
"""
