"""The recorder: what runs in somebody else's training process, and how to read from outside what it wrote.

Standard library only; torch is used where the training script has imported it, and never imported here.
"""

from sftriage.recorder.files import find_rings
from sftriage.recorder.layout import RingInfo
from sftriage.recorder.monitor import Monitor, stage

__all__ = [
    "Monitor",
    "RingInfo",
    "find_rings",
    "stage",
]
