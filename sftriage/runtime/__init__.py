"""Puts the parts together: a job on this host with its agent and controller. Nothing here knows a command line.

`local` runs a job with `triage` beside it, in a loop; `launcher` starts it. `uploads` and `indexing` are sinks.
"""
