"""The accounting and the verdicts: pure numpy, no I/O, no clock.

A window is cut where its ranks are together (`segments`), walked (`accounting`) and replayed (`whatif`), but for what
the window before has in common with it (`overlap`). Who is slow is told along the run, by `clear_events` and
`sequential`, and since when by `course`; the job is held against its past by `baseline` and `regression`. `evidence`
puts all that beside each other, `verdicts` labels it, and `judging` goes from window to window. `clocks` says which
clock that stands on, `system` what the kernel counted of it.
"""

from sftriage.frontier.evidence import Past
from sftriage.frontier.judging import judge
from sftriage.frontier.settings import Settings

__all__ = ["Past", "Settings", "judge"]
