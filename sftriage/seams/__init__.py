"""The stages of an unedited training script, from torch's own seams.

`sftriage.seams.site` is a folder for ``PYTHONPATH``: its ``sitecustomize`` sees torch being imported, and has
`sftriage.seams.patches` put the seams in. The recorder is imported once the script has trained a step. Standard library
only; torch is used where the script has imported it.
"""
