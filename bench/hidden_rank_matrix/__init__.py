"""The hidden-rank matrix: faults drawn from a seed, real jobs that have them, and what each rule says.

`rows` is what a row is, `drawing` draws them, `job` runs in the ranks and `running` runs it from outside; `recorded`
reads a kept row, `rivals` and `scoring` judge it, and `report` says how it went.
"""
