"""The accounting and the verdicts: pure numpy, no I/O, no clock.

`segments` cuts a window where its ranks are together, `accounting` says where the exposed time went, `whatif` what
would be saved by mending one suspect, `baseline` what the job's healthy profile is, `recurrence` when a suspect was
there, `evidence` puts all that beside each other, `verdicts` puts a label on it, and `clocks` says which clock that
stands on.
"""

from sftriage.frontier.evidence import Past
from sftriage.frontier.judging import judge
from sftriage.frontier.settings import Settings

__all__ = ["Past", "Settings", "judge"]
