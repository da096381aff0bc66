"""Remedies against a straggler that stays: StragglAR for all-reduces, Adaptra's orders for pipelines.

The story, file by file: `advice` models what a remedy would save, and `loop` starts, keeps and undoes it (both pure, in
the controller). `switching` lets the group's ranks vote on it, through a file that the agent writes. `stragglar` and
`adapted` carry it out in the trainer; only these import torch. `schedule` has the orders that both sides use.
"""
