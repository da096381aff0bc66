"""The stages of a training script that nobody has edited, from torch's own seams.

`sftriage.seams.site` is a folder for ``PYTHONPATH``: its ``sitecustomize`` sees torch being imported, and has
`sftriage.seams.patches` put the seams in. Until the script has trained a step nothing of the recorder is imported, so
that a process that imports torch and does not train (a launcher, a compile worker) pays next to nothing. Standard
library only; torch is used where the script has imported it.
"""
