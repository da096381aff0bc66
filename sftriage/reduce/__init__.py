"""Reduces heavy traces to the coarse stages that the recorder knows, so that the two can be compared.

`reading` opens files and packs the `events` of a trace, so that a trace of any size fits into memory. `stages` cuts
them into steps and stages, `together` joins ranks into a window and compares it with the signal, `inside` finds what
filled a stage, `samples` reads sampled stacks, `causes` says why a stage was slow, and `opening` and `flames` serve
viewers. All times are whole nanoseconds.
"""
