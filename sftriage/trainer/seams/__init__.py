"""Detects the stages of an unedited training script, at torch's own seams.

`sftriage.trainer.seams.site` is a folder for ``PYTHONPATH``: its ``sitecustomize`` waits for torch's import, and then
`sftriage.trainer.seams.patches` installs the seams. The recorder is imported once the script has trained a step.
"""
