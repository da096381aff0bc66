"""Assembles the parts: jobs, agents, controllers. Independent of the command line.

`local` starts a job, or takes one over, with `triage` beside it, in a loop. `copies` has sinks.
"""
