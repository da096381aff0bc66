"""Executors: what runs a profiler on one rank, and what checks that it brought what was promised."""

from sftriage.capture.executor import Executor, Product, RankLook
from sftriage.capture.left import NsysLeft, StacksLeft
from sftriage.capture.nsys import NsysCapture, NsysPlace
from sftriage.capture.stacks import StacksCapture
from sftriage.capture.torch_profiler import TorchCapture
from sftriage.capture.verify import verify_trace

__all__ = [
    "Executor",
    "NsysCapture",
    "NsysLeft",
    "NsysPlace",
    "Product",
    "RankLook",
    "StacksCapture",
    "StacksLeft",
    "TorchCapture",
    "verify_trace",
]
