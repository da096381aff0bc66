"""Python stacks of a process, sampled by a thread of its own: of a trainer, and of its DataLoader's workers.

It knows of no ring and no capture. Standard library only, and what runs in a trainer: see `sftriage.recorder`.
"""
