"""The verdicts: who is slow, in which stage and since when. Pure: the state of a run goes in and comes out again.

`sequential` finds who is slow along the run, and `course` since when; `baseline` and `regression` hold the job against
its past. All that is `evidence`, with `candidates` for the suspect; `judging` labels it, window after window. `clocks`
says which clock that stands on, `system` what the kernel counted of it; every threshold is in `settings`.
"""

from sftriage.verdicts.evidence import Past
from sftriage.verdicts.judging import judge
from sftriage.verdicts.settings import Settings

__all__ = ["Past", "Settings", "judge"]
