"""The verdicts: who is slow, in which stage and since when. Pure: the state of a run goes in and comes out again.

Who is slow is told along the run, by `clear_events` and `sequential`, and since when by `course`; the job is held
against its past by `baseline` and `regression`. All that is `evidence`, put together by `gathering`; `labels` labels
it, and `judging` goes from window to window. `clocks` says which clock that stands on, `system` what the kernel counted
of it; every threshold is in `settings`.
"""

from sftriage.verdicts.evidence import Past
from sftriage.verdicts.judging import judge
from sftriage.verdicts.settings import Settings

__all__ = ["Past", "Settings", "judge"]
