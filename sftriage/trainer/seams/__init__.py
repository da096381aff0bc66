"""The stages of an unedited training script, from torch's own seams.

`sftriage.trainer.seams.site` is a folder for ``PYTHONPATH``: its ``sitecustomize`` waits for torch's import and has
`sftriage.trainer.seams.patches` put the seams in. The recorder is imported once the script has trained a step.
"""
