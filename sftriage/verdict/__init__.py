"""Who is slow, in which stage and since when. Pure numpy: no I/O and no clock; a run's state goes in and comes out.

`accounting` cuts a window where its ranks are together and walks through it, `whatif` replays it, and `units` has what
ranks and hosts would have saved. `sequential` finds who is slow along the run, and `course` since when; `baseline` and
`regression` hold the job against its past. `evidence` gathers all that, with `candidates` for the suspect; `judging`
labels it, window after window. `clocks` picks the clock, and `system` reads what the kernel counted. `stalls` judges
jobs that stand still. Every threshold of a window is in `settings`.
"""
