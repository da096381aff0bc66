"""A GPU that is a clock and a queue, in the place of `torch.cuda`."""


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
    """

    def __init__(self):
        self.now_ns = self._free_ns = 0
        self.made = self.recorded = 0
        self.initialised, self.is_capturing, self.broken = True, False, False
        self.stream = object()

    def launch(self, ns):
        self._free_ns = self.reached_ns() + ns

    def passes(self, ns):
        self.now_ns += ns

    def catches_up(self):
        self.now_ns = self.reached_ns()

    def reached_ns(self):
        return max(self.now_ns, self._free_ns)

    def is_initialized(self):
        return self.initialised

    def current_stream(self):
        return self.stream

    def is_current_stream_capturing(self):
        return self.is_capturing

    def Event(self, enable_timing):
        assert enable_timing
        return FakeEvent(self)
