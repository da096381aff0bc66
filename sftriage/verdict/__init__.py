"""Which rank is slow, in which stage and since when. Pure numpy: no I/O and no clock; state goes in and comes out.

`accounting` cuts a window where its ranks are together, and computes the frontier. `whatif` replays it and compares it
with the job's past; `units` computes what fixing a rank or a host would save, and what the system did to it.
`sequential` finds the slow rank along the run, `candidates` the onset, `regression` slowdowns of the whole job.
`evidence` combines them, and `judging` labels windows on the right clock. `stalls` judges steps that do not end.
"""
