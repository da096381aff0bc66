"""The parts of `long_run.py`.

`jobs` says what is recorded, `loads` keeps the machine busy meanwhile, `recording` does it, and `synchronous` takes the
waiting out of what was recorded and puts it in again: between the two, `resampling` makes long jobs of many ranks of
short ones of few, and `faults` slows some ranks. `rules` is all that the bench knows of who judges, `counting` what a
count is, `simulating` does the work in processes of its own, and `report` and `plotting` tell it.
"""
