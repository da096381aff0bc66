"""Time in the garbage collector and in the compiler adds up in the ring, without a request."""

import gc
import os
import struct
import sys
import types
from pathlib import Path

import pytest

from sftriage.trainer.layout import COLLECTED, COMPILED, LIVE_AT, find_rings
from sftriage.trainer.monitor import Monitor


class Compiler:
    """The part of torch's compiler that calls back."""

    def __init__(self):
        self.begins, self.ends = [], []
        self.register_start_callback, self.register_end_callback = self.begins.append, self.ends.append
        self.remove_start_callback, self.remove_end_callback = self.begins.remove, self.ends.remove

    def compile(self):
        for callback in [*self.begins, *self.ends]:
            callback(object())


@pytest.fixture
def compiler(monkeypatch):
    found = Compiler()
    module = types.SimpleNamespace(callback_handler=found)
    monkeypatch.setitem(sys.modules, "torch._dynamo.callback", module)
    return found


@pytest.fixture
def monitor(tmp_path):
    with Monitor(rings=tmp_path) as made:
        yield made


def total_ns(directory: Path, word: int) -> int:
    (ring,) = find_rings(directory)
    return struct.unpack_from("=q", ring.read_bytes(), LIVE_AT + 8 * word)[0]


def test_collections_add_up(tmp_path, monitor):
    before_ns = total_ns(tmp_path, COLLECTED)
    gc.collect()
    once_ns = total_ns(tmp_path, COLLECTED)
    gc.collect()
    assert before_ns < once_ns < total_ns(tmp_path, COLLECTED)


def test_compilations_add_up_once_a_step_has_found_the_compiler(tmp_path, monitor, compiler):
    with monitor.step():
        pass
    compiler.compile()
    once_ns = total_ns(tmp_path, COMPILED)
    compiler.compile()
    assert 0 < once_ns < total_ns(tmp_path, COMPILED)
    # AND a reset of the compiler, which forgets all callbacks, does not disturb the end
    compiler.begins.clear(), compiler.ends.clear()
    monitor.close()


def test_a_closed_monitor_leaves_no_callback(tmp_path, compiler):
    before = list(gc.callbacks)
    monitor = Monitor(rings=tmp_path)
    with monitor.step():
        pass
    assert len(gc.callbacks) == len(before) + 1
    monitor.close()
    assert (gc.callbacks, compiler.begins, compiler.ends) == (before, [], [])


def test_a_forked_child_counts_nothing(tmp_path, monitor):
    gc.collect()
    counted_ns, n_callbacks = total_ns(tmp_path, COLLECTED), len(gc.callbacks)
    gc.disable()
    try:
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(len(gc.callbacks) != n_callbacks - 1)
        _, status = os.waitpid(child, 0)
        assert (status, total_ns(tmp_path, COLLECTED)) == (0, counted_ns)
    finally:
        gc.enable()
