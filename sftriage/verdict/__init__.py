"""Who is slow, in which stage and since when. Pure numpy: no I/O and no clock; a run's state goes in and comes out.

`accounting` cuts a window where its ranks are together and walks through it. `whatif` replays it and holds it against
the job's past, and `units` has what ranks and hosts would have saved and what the system kept them from. `sequential`
finds who is slow along the run, `candidates` since when. `evidence` gathers all that, with `regression` for the job
against its own best; `judging` labels it on the right clock, window after window. `stalls` judges standing jobs.
"""
