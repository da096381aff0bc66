"""Queries NVML about this host's GPUs, in a process of its own: a call to a broken GPU may never return.

`sftriage.agent.gpus` runs it as a script, by its path. It imports nothing of sftriage, so a query costs the host a
twentieth of a second of CPU time. It prints one JSON object per line and flushes each, so that a call that hangs does
not lose earlier results::

    {"driver": "550.54.15", "count": 8}
    {"querying": 0}                             the next line is about GPU 0; as the last line it shows what hangs
    {"gpu": {"index": 0, ...}}                  all that is known of it so far; with clocks from the second time on
    {"done": true}

or ``{"error": "LIBRARY_NOT_FOUND"}`` without a driver. A value that the GPU, the driver or this user's rights do not
report is null. ``problems`` lists other errors by NVML's own names (``GPU_IS_LOST``).
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
"""By their bit."""

# A fact that is missing, or that this user may not see, is no problem of the GPU.
_ABSENT = (
    "NOT_SUPPORTED", "NO_PERMISSION", "FUNCTION_NOT_FOUND", "NOT_FOUND", "INVALID_ARGUMENT", "NO_DATA", "DEPRECATED",
    "ARGUMENT_VERSION_MISMATCH",
)  # fmt: skip


class Device:
    """One GPU: makes one query at a time, and collects its errors in ``problems``."""

    def __init__(self, nvml: Any, handle: Any, problems: list[str]) -> None:
        self._nvml, self._handle, self.problems = nvml, handle, problems
        self._clocks_mhz: list[float] = []
        self._reasons: list[list[str]] = []

    def query(self, function: str, *arguments: str) -> Any:
        """Call a function of NVML; ``arguments`` name NVML's constants. None if it fails."""
        nvml = self._nvml
        try:
            return getattr(nvml, function)(self._handle, *(getattr(nvml, argument) for argument in arguments))
        except nvml.NVMLError as error:
            name = error_name(nvml, error)
            if name not in _ABSENT and name not in self.problems:
                self.problems.append(name)
        except AttributeError:
            # This pynvml is older than the function.
            pass
        return None

    def facts(self) -> dict[str, Any]:
        """Values that are read once."""
        pci, memory = self.query("nvmlDeviceGetPciInfo"), self.query("nvmlDeviceGetMemoryInfo")
        uncorrected, corrected = (
            self.query("nvmlDeviceGetTotalEccErrors", f"NVML_MEMORY_ERROR_TYPE_{kind}", "NVML_VOLATILE_ECC")
            for kind in ("UNCORRECTED", "CORRECTED")
        )
        return {
            "name": self.query("nvmlDeviceGetName"),
            "pci_bus_id": None if pci is None else _text(pci.busId),
            "sm_clock_max_mhz": self.query("nvmlDeviceGetMaxClockInfo", "NVML_CLOCK_SM"),
            "power_limit_mw": self.query("nvmlDeviceGetEnforcedPowerLimit"),
            "ecc_uncorrected": uncorrected,
            "ecc_corrected": corrected,
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "pids": [process.pid for process in (self.query("nvmlDeviceGetComputeRunningProcesses") or ())],
        }

    def sample(self) -> dict[str, Any]:
        """The median clock of the samples so far, and the fraction of them in which each reason limited it."""
        bits = self.query("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # (its name before R535)
            bits = self.query("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            self._reasons.append([name for at, name in enumerate(CLOCK_REASONS) if bits >> at & 1])
        if (clock_mhz := self.query("nvmlDeviceGetClockInfo", "NVML_CLOCK_SM")) is not None:
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


def write(**line: Any) -> None:
    """Write a line and flush it."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def read(nvml: Any) -> None:
    """Write the facts of every GPU, and then samples of all of them in turn."""
    nvml.nvmlInit()
    count = nvml.nvmlDeviceGetCount()
    write(driver=_text(nvml.nvmlSystemGetDriverVersion()), count=count)
    devices: list[tuple[Device, dict[str, Any]]] = []
    for index in range(count):
        write(querying=index)
        facts: dict[str, Any] = {"index": index, "uuid": f"#{index}", "problems": []}
        try:
            device = Device(nvml, nvml.nvmlDeviceGetHandleByIndex(index), facts["problems"])
            facts["uuid"] = device.query("nvmlDeviceGetUUID") or facts["uuid"]
            facts |= device.facts()
            devices.append((device, facts))
        except nvml.NVMLError as error:
            facts["problems"].append(error_name(nvml, error))
        write(gpu=facts)
    for turn in range(SAMPLES if devices else 0):
        if turn:
            time.sleep(SAMPLE_EVERY_S)
        for device, facts in devices:
            write(querying=facts["index"])
            write(gpu=facts | device.sample())
    write(done=True)


def main() -> None:
    """Read within a deadline, in seconds: the only argument. The parent may be dead by then, so this ends itself."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, float(sys.argv[1]))
    try:
        import pynvml
    except ImportError:
        write(error="NO_PYNVML")
        return
    try:
        read(pynvml)
    except pynvml.NVMLError as error:
        write(error=error_name(pynvml, error))


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
