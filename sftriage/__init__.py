"""sftriage: auto-triage for distributed PyTorch training.

The public names are those below, `sftriage.testing`, and `sftriage.integrations` with its modules. Anything not named
here may change. Names are imported on first use: a trainer that uses `Monitor` loads nothing but the standard library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftriage.errors import SftriageError as SftriageError
    from sftriage.library import RecordedWindows as RecordedWindows
    from sftriage.library import account as account
    from sftriage.library import explain as explain
    from sftriage.library import judge as judge
    from sftriage.library import load as load
    from sftriage.library import whatif as whatif
    from sftriage.model.captures import Decision as Decision
    from sftriage.model.verdicts import Settings as Settings
    from sftriage.model.verdicts import Suspect as Suspect
    from sftriage.model.verdicts import Verdict as Verdict
    from sftriage.model.windows import StageSchema as StageSchema
    from sftriage.model.windows import Window as Window
    from sftriage.runs.whatif import WhatIf as WhatIf
    from sftriage.trainer.monitor import Monitor as Monitor
    from sftriage.trainer.monitor import stage as stage
    from sftriage.verdict.accounting import Accounting as Accounting

_HOMES = {
    "errors": ("SftriageError",),
    "library": ("RecordedWindows", "account", "explain", "judge", "load", "whatif"),
    "model.captures": ("Decision",),
    "model.verdicts": ("Settings", "Suspect", "Verdict"),
    "model.windows": ("StageSchema", "Window"),
    "runs.whatif": ("WhatIf",),
    "trainer.monitor": ("Monitor", "stage"),
    "verdict.accounting": ("Accounting",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = ["__version__", *sorted(_HOME_OF)]


if not TYPE_CHECKING:  # (a type checker would take any name for one of ours)

    def __getattr__(name: str) -> Any:
        """Import a public name on first use (PEP 562)."""
        if name in _HOME_OF:
            return getattr(import_module(f"sftriage.{_HOME_OF[name]}"), name)
        raise AttributeError(f"module 'sftriage' has no attribute {name!r}")
