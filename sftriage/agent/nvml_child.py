"""Asks NVML about this host's GPUs, in a process of its own: a call to a broken GPU may never come back.

Run as a script, by its path: it imports nothing of sftriage, so that asking costs the host a twentieth of a second of
processor time. It says what it finds on stdout, one JSON object a line and each line at once, so that what was found
before a call that hangs is not lost::

    {"driver": "550.54.15", "count": 8}
    {"asking": 0}                               what comes next is about GPU 0; a last line like this is where it hangs
    {"gpu": 0, "facts": {...}, "mig": [...]}    what does not change from one instant to the next
    {"sample": 0, "facts": {...}}               what does, several times over
    {"done": true}

or ``{"error": "LIBRARY_NOT_FOUND"}`` where there is nobody to ask. A fact that the GPU, the driver or this user's
rights do not have is absent. Other errors stand in ``problems`` by NVML's own names (``GPU_IS_LOST``).
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SAMPLES = 6
SAMPLE_EVERY_S = 0.05
MAX_PROCESSES = 64

CLOCK_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
    0x200: "board_limit",
    0x400: "reliability",
}

_Scale = Callable[[Any], Any]
_Fact = tuple[str, str, tuple[Any, ...], _Scale]


def _same(value: Any) -> Any:
    return value


def _watts(milliwatts: int) -> float:
    return milliwatts / 1000


def _reasons(bits: int) -> list[str]:
    return [CLOCK_REASONS.get(1 << at, f"bit_{at}") for at in range(64) if bits >> at & 1]


# What a fact is called, who knows it, and what else that one is told: text is the name of one of NVML's constants.
STANDING: tuple[_Fact, ...] = (
    ("uuid", "nvmlDeviceGetUUID", (), _same),
    ("name", "nvmlDeviceGetName", (), _same),
    ("pci_bus_id", "nvmlDeviceGetPciInfo", (), lambda found: _text(found.busId)),
    ("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", ("NVML_CLOCK_SM",), _same),
    ("memory_clock_mhz", "nvmlDeviceGetClockInfo", ("NVML_CLOCK_MEM",), _same),
    ("memory_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", ("NVML_CLOCK_MEM",), _same),
    ("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", (), _watts),
    ("power_limit_default_w", "nvmlDeviceGetPowerManagementDefaultLimit", (), _watts),
    ("slowdown_c", "nvmlDeviceGetTemperatureThreshold", ("NVML_TEMPERATURE_THRESHOLD_SLOWDOWN",), _same),
    ("shutdown_c", "nvmlDeviceGetTemperatureThreshold", ("NVML_TEMPERATURE_THRESHOLD_SHUTDOWN",), _same),
    (
        "ecc_uncorrected",
        "nvmlDeviceGetTotalEccErrors",
        ("NVML_MEMORY_ERROR_TYPE_UNCORRECTED", "NVML_VOLATILE_ECC"),
        _same,
    ),
    ("ecc_corrected", "nvmlDeviceGetTotalEccErrors", ("NVML_MEMORY_ERROR_TYPE_CORRECTED", "NVML_VOLATILE_ECC"), _same),
    ("pcie_replays", "nvmlDeviceGetPcieReplayCounter", (), _same),
    ("pcie_gen_max", "nvmlDeviceGetMaxPcieLinkGeneration", (), _same),
    ("pcie_width", "nvmlDeviceGetCurrPcieLinkWidth", (), _same),
    ("pcie_width_max", "nvmlDeviceGetMaxPcieLinkWidth", (), _same),
)
PASSING: tuple[_Fact, ...] = (
    ("sm_clock_mhz", "nvmlDeviceGetClockInfo", ("NVML_CLOCK_SM",), _same),
    ("power_w", "nvmlDeviceGetPowerUsage", (), _watts),
    ("temperature_c", "nvmlDeviceGetTemperature", ("NVML_TEMPERATURE_GPU",), _same),
    ("pcie_gen", "nvmlDeviceGetCurrPcieLinkGeneration", (), _same),
    ("utilisation_percent", "nvmlDeviceGetUtilizationRates", (), lambda found: found.gpu),
    ("memory_utilisation_percent", "nvmlDeviceGetUtilizationRates", (), lambda found: found.memory),
)
NVLINK_COUNTERS = {
    "replay": "NVML_NVLINK_ERROR_DL_REPLAY",
    "recovery": "NVML_NVLINK_ERROR_DL_RECOVERY",
    "crc_flit": "NVML_NVLINK_ERROR_DL_CRC_FLIT",
    "crc_data": "NVML_NVLINK_ERROR_DL_CRC_DATA",
}
# Not to have a fact, or not to be allowed to see it, is no news about the GPU.
_ABSENT = (
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "FUNCTION_NOT_FOUND",
    "NOT_FOUND",
    "INVALID_ARGUMENT",
    "NO_DATA",
    "DEPRECATED",
    "ARGUMENT_VERSION_MISMATCH",
)


class Gpu:
    """One GPU, or one MIG instance: asks one question at a time and keeps what went wrong.

    Args:
        nvml: the ``pynvml`` module.
        handle: NVML's handle.
        problems: where to put the names of errors.
    """

    def __init__(self, nvml: Any, handle: Any, problems: list[str]) -> None:
        self._nvml, self._handle, self.problems = nvml, handle, problems

    def ask(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML answers, or None."""
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

    def facts(self, wanted: tuple[_Fact, ...]) -> dict[str, Any]:
        """Those of the facts that there are."""
        found = {}
        for name, function, arguments, scale in wanted:
            value = self.ask(function, *arguments)
            if value is not None:
                found[name] = scale(value)
        return found

    def sample(self) -> dict[str, Any]:
        """What changes from one instant to the next."""
        found = self.facts(PASSING)
        bits = self.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if bits is None:
            # Its name until R535.
            bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits is not None:
            found["clock_reasons"] = _reasons(bits)
        return found

    def nvlink(self) -> dict[str, Any]:
        """How many links there are, how many are up, and their errors since they were last cleared."""
        states = []
        for link in range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18)):
            state = self.ask("nvmlDeviceGetNvLinkState", link)
            if state is None:
                break
            states.append(bool(state))
        if not states:
            return {}
        errors: dict[str, int] = {}
        for name, counter in NVLINK_COUNTERS.items():
            counts = [self.ask("nvmlDeviceGetNvLinkErrorCounter", at, counter) for at, up in enumerate(states) if up]
            if any(count is not None for count in counts):
                errors[name] = sum(count or 0 for count in counts)
        return {"nvlink_links": len(states), "nvlink_links_up": sum(states), "nvlink_errors": errors}

    def processes(self) -> list[dict[str, Any]] | None:
        """Who has a CUDA context here; None where that is not to be known."""
        found = self.ask("nvmlDeviceGetComputeRunningProcesses")
        if found is None:
            return None
        return [
            {"pid": process.pid, "name": _command(process.pid), "memory_bytes": process.usedGpuMemory}
            for process in found[:MAX_PROCESSES]
        ]

    def instances(self) -> list[dict[str, Any]] | None:
        """The GPU's MIG instances; None where it is not in MIG mode."""
        mode = self.ask("nvmlDeviceGetMigMode")
        if mode is None or mode[0] != 1:
            return None
        found = []
        for index in range(self.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            handle = self.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is None:
                continue
            instance = Gpu(self._nvml, handle, self.problems)
            found.append(
                {
                    "uuid": instance.ask("nvmlDeviceGetUUID"),
                    "gpu_instance": instance.ask("nvmlDeviceGetGpuInstanceId"),
                    "compute_instance": instance.ask("nvmlDeviceGetComputeInstanceId"),
                    "processes": instance.processes(),
                }
            )
        return found


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
    gpus = {}
    for index in range(count):
        say(asking=index)
        problems: list[str] = []
        facts: dict[str, Any] = {}
        instances = None
        try:
            gpu = gpus[index] = Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), problems)
            facts = gpu.facts(STANDING) | gpu.nvlink()
            facts["processes"] = gpu.processes()
            instances = gpu.instances()
        except nvml.NVMLError as error:
            problems.append(error_name(nvml, error))
        say(gpu=index, facts=facts, mig=instances, problems=problems)
    for turn in range(SAMPLES if gpus else 0):
        if turn:
            time.sleep(SAMPLE_EVERY_S)
        for index, gpu in gpus.items():
            say(asking=index)
            say(sample=index, facts=gpu.sample(), problems=gpu.problems)
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


def _command(pid: int) -> str:
    """What the kernel calls a process: never its arguments, which may hold anything."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    main()
