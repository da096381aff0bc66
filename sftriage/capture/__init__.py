"""Executors: what runs a profiler on one rank, and what checks that it brought what was promised."""

from sftriage.capture.torch_profiler import TorchCapture
from sftriage.capture.verify import verify_trace

__all__ = ["TorchCapture", "verify_trace"]
