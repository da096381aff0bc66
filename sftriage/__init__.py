"""sftriage: auto-triage for distributed PyTorch training.

A trainer imports only `Monitor`, and with it nothing but the standard library. Everything else is imported when it is
first named, so that ``import sftriage`` stays free inside somebody else's training process.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sftriage.model.windows import StageSchema as StageSchema
    from sftriage.trainer.monitor import Monitor as Monitor
    from sftriage.trainer.monitor import stage as stage

_HOMES = {
    "Monitor": "sftriage.trainer.monitor",
    "StageSchema": "sftriage.model.windows",
    "stage": "sftriage.trainer.monitor",
}

__version__ = "0.1.0"
__all__ = ["Monitor", "StageSchema", "__version__", "stage"]


def __getattr__(name: str) -> Any:
    """Import a public name from its room when it is first used (PEP 562)."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'sftriage' has no attribute {name!r}")
