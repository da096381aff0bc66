"""Asks NVML about this host's GPUs, in a process of its own: a call to a broken GPU may never come back.

Run as a script, by its path: it imports nothing of sftriage, so that asking costs the host a twentieth of a second of
processor time. It says what it finds on stdout, one JSON object a line and each line at once, so that what was found
before a call that hangs is not lost::

    {"driver": "550.54.15", "count": 8}
    {"asking": 0}                               what comes next is about GPU 0; a last line like this is where it hangs
    {"gpu": {"index": 0, ...}}                  all that is known of it so far: its clocks only from the second time on
    {"done": true}

or ``{"error": "LIBRARY_NOT_FOUND"}`` where there is nobody to ask. What the GPU, the driver or this user's rights do
not tell is null. Other errors stand in ``problems`` by NVML's own names (``GPU_IS_LOST``).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import Any

SAMPLES = 6
SAMPLE_EVERY_S = 0.05

CLOCK_REASONS = (
    "gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "sync_boost", "sw_thermal_slowdown",
    "hw_thermal_slowdown", "hw_power_brake_slowdown", "display_clock_setting", "board_limit", "reliability",
)  # fmt: skip
"""By the bit that stands for each."""

# Not to have a fact, or not to be allowed to see it, is no news about the GPU.
_ABSENT = (
    "NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "NOT_FOUND", "INVALID_ARGUMENT", "NO_DATA", "DEPRECATED",
    "ARGUMENT_VERSION_MISMATCH",
)  # fmt: skip


class Device:
    """One GPU: asks one question at a time and keeps what went wrong."""

    def __init__(self, nvml: Any, handle: Any, problems: list[str]) -> None:
        self._nvml, self._handle, self.problems = nvml, handle, problems
        self._clocks_mhz: list[float] = []
        self._reasons: list[list[str]] = []

    def ask(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML answers, or None. A text is the name of one of NVML's constants."""
        nvml = self._nvml
        try:
            told = [getattr(nvml, argument) if isinstance(argument, str) else argument for argument in arguments]
            return getattr(nvml, function)(self._handle, *told)
        except nvml.NVMLError as error:
            name = error_name(nvml, error)
            if name not in _ABSENT and name not in self.problems:
                self.problems.append(name)
        except AttributeError:
            # A pynvml that is older than the question.
            pass
        return None

    def standing(self) -> dict[str, Any]:
        """What does not change from one instant to the next."""
        pci, memory = self.ask("nvmlDeviceGetPciInfo"), self.ask("nvmlDeviceGetMemoryInfo")
        uncorrected, corrected = (
            self.ask("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", "NVML_VOLATILE_ECC")
            for kind in ("UNCORRECTED", "CORRECTED")
        )
        return {
            "name": self.ask("nvmlDeviceGetName"),
            "pci_bus_id": None if pci is None else _text(pci.busId),
            "sm_clock_max_mhz": self.ask("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
            "ecc_uncorrected": uncorrected,
            "ecc_corrected": corrected,
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "pids": [process.pid for process in (self.ask("nvmlDeviceGetComputeRunningProcesses") or ())],
        }

    def sample(self) -> dict[str, Any]:
        """What does: the median clock of the samples so far, and in how many of them each reason limited it."""
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Its name until R535.
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            self._reasons.append([name for at, name in enumerate(CLOCK_REASONS) if bits >> at & 1])
        if (clock_mhz := self.ask("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")) is not None:
            self._clocks_mhz.append(clock_mhz)
        n, every = len(self._reasons), [name for reasons in self._reasons for name in reasons]
        return {
            "sm_clock_mhz": sorted(self._clocks_mhz)[len(self._clocks_mhz) // 2] if self._clocks_mhz else None,
            "clock_reasons": {name: every.count(name) / n for name in every} if n else None,
        }


def error_name(nvml: Any, error: Any) -> str:
    """NVML's own name of an error, without its prefix."""
    for name in dir(nvml):
        if name.startswith("NVML_ERROR_") and getattr(nvml, name) == error.value:
            return name[len("NVML_ERROR_") :]
    return f"ERROR_{error.value}"


def say(**what: Any) -> None:
    """One line, at once."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def read(nvml: Any) -> None:
    """Say everything about every GPU, and then how they are doing, several times over and side by side."""
    nvml.nvmlInit()
    count = nvml.nvmlDeviceGetCount()
    say(driver=_text(nvml.nvmlSystemGetDriverVersion()), count=count)
    devices: list[tuple[Device, dict[str, Any]]] = []
    for index in range(count):
        say(asking=index)
        facts: dict[str, Any] = {"index": index, "uuid": f"#{index}", "problems": []}
        try:
            device = Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index), facts["problems"])
            facts["uuid"] = device.ask("nvmlDeviceGetUUID") or facts["uuid"]
            facts |= device.standing()
            devices.append((device, facts))
        except nvml.NVMLError as error:
            facts["problems"].append(error_name(nvml, error))
        say(gpu=facts)
    for turn in range(SAMPLES if devices else 0):
        if turn:
            time.sleep(SAMPLE_EVERY_S)
        for device, facts in devices:
            say(asking=facts["index"])
            say(gpu=facts | device.sample())
    say(done=True)


def main() -> None:
    """Read within so many seconds: the one argument. Whoever asked may be dead by then, and nobody else ends this."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    try:
        import pynvml
    except ImportError:
        say(error="NO_PYNVML")
        return
    try:
        read(pynvml)
    except pynvml.NVMLError as error:
        say(error=error_name(pynvml, error))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
