"""What runs in the training process: the monitor and its rings, seams, captures, and the sampler of stacks.

Standard library only; torch is used where the training script has imported it, and never imported here. This module
imports nothing: a process whose ``PYTHONPATH`` begins with `sftriage.trainer.seams.site` loads only what it uses.
"""
