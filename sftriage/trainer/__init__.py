"""Runs in the training process: the monitor and its rings, the seams, captures, and the sampler of stacks.

It imports only the standard library. It uses torch if the training script has imported it, and never imports it itself.
This module imports nothing, so that a process with `sftriage.trainer.seams.site` on its ``PYTHONPATH`` loads little.
"""
