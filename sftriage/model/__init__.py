"""The records that packages exchange: frozen, and free of third-party imports where the trainer needs them.

`windows`: stages, steps, windows and the kernel's counters. `verdicts`: labels, suspects and thresholds. `captures`:
decisions and captures. `events`: what the journal keeps and sinks receive.
"""
