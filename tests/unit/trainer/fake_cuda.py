"""A GPU that is a clock and a queue, in the place of `torch.cuda` and of CUDA's driver."""

import ctypes
from time import monotonic_ns
from types import SimpleNamespace

STREAM, NOT_READY, RELAXED, NO_CONTEXT, ILLEGAL_ADDRESS = 7, 600, 2, 201, 700
HOST_NS = 10_000
"""What a host takes to launch something, or to wait: all else takes it no time."""

_HANDLE, _MODE = ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)
_SIGNATURES = {
    "create": (ctypes.POINTER(_HANDLE), ctypes.c_uint),
    "record": (_HANDLE, _HANDLE),
    "query": (_HANDLE,),
    "elapsed": (ctypes.POINTER(ctypes.c_float), _HANDLE, _HANDLE),
    "capturing": (_HANDLE, _MODE),
    "exchange": (_MODE,),
    "destroy": (_HANDLE,),
}


class FakeEvent:
    def __init__(self, device):
        self._device, self.at_ns = device, None
        device.made += 1

    def record(self, stream):
        assert stream is self._device.stream
        if self._device.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        assert not self._device.is_capturing, "this event is now part of somebody's graph"
        self._device.recorded += 1
        self.at_ns = self._device.reached_ns()

    def query(self):
        return self.at_ns <= self._device.now_ns

    def elapsed_time(self, end):
        assert self.query(), "not ready: this would raise"
        assert end.query(), "not ready: this would raise"
        return (end.at_ns - self.at_ns) / 1e6


class FakeDevice:
    """One stream of a GPU: what is launched is done one after the other, no sooner than it was launched.

    It stands for `torch.cuda`, and has nothing that synchronises: whoever asked for that would get an AttributeError.
    `functions` are those of a driver of the same queue.
    """

    def __init__(self):
        self.now_ns = self._free_ns = 0
        self._host_ns = monotonic_ns()
        self.made = self.recorded = self.number = 0
        self.initialised, self.is_capturing, self.broken = True, False, False
        self.has_context = True
        self.stream = object()
        self.complaints = []
        self._mode, self._events = 0, {}
        self._kept = [
            ctypes.CFUNCTYPE(ctypes.c_int, *types)(self._answering(getattr(self, f"_{name}")))
            for name, types in _SIGNATURES.items()
        ]

    def launch(self, ns):
        self._free_ns = self.reached_ns() + ns
        self._host_ns += HOST_NS

    def passes(self, ns):
        self.now_ns += ns
        self._host_ns += HOST_NS

    def catches_up(self):
        self.now_ns = self.reached_ns()

    def reached_ns(self):
        return max(self.now_ns, self._free_ns)

    def host_clock(self):
        return self._host_ns

    def is_initialized(self):
        return self.initialised

    def current_stream(self):
        return self.stream

    def is_current_stream_capturing(self):
        return self.is_capturing

    def Event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)

    @property
    def in_torch(self):
        """What `torch` is: all that is used of it."""
        private = SimpleNamespace(
            _cuda_getDevice=lambda: self.number, _cuda_getCurrentRawStream=lambda number: STREAM + number
        )
        return SimpleNamespace(cuda=self, _C=private)

    def functions(self):
        """Their addresses, in the order in which they are wanted."""
        return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in self._kept)

    def _answering(self, function):
        def answer(*arguments):
            try:
                return function(*arguments) or 0
            except RuntimeError:
                return ILLEGAL_ADDRESS
            except Exception as error:  # (nobody else would hear of it)
                self.complaints.append(error)
                return ILLEGAL_ADDRESS

        return answer

    def _carefully(self):
        assert self._mode == RELAXED, "this would end whatever graph is being captured"

    def _create(self, found, flags):
        self._carefully()
        assert flags == 0, "these events have no time"
        if not self.has_context:
            return NO_CONTEXT
        found[0] = len(self._events) + 1
        self._events[found[0]] = FakeEvent(self), self.number
        return 0

    def _of(self, handle):
        event, number = self._events[handle]
        assert number == self.number, "an event of another device's context"
        return event

    def _record(self, handle, stream):
        assert stream == STREAM + self.number
        self._of(handle).record(self.stream)

    def _query(self, handle):
        self._carefully()
        return 0 if self._of(handle).query() else NOT_READY

    def _elapsed(self, found, start, end):
        self._carefully()
        found[0] = self._of(start).elapsed_time(self._of(end))

    def _capturing(self, stream, found):
        assert stream == STREAM + self.number
        found[0] = int(self.is_capturing)

    def _exchange(self, mode):
        self._mode, mode[0] = mode[0], self._mode

    def _destroy(self, handle):
        del self._events[handle]
        self._events[object()] = None  # (handles are given out once)
