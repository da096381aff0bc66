"""Why a captured rank was slow, in words: what is done at a place, or was done to the rank, and what to do about it."""

from __future__ import annotations

DOES: dict[str, str] = {
    "sleep": "which sleeps",
    "dataloader_workers": "which waits for the workers of its DataLoader",
    "lock": "which waits for another thread or process",
    "subprocess": "which starts another program and waits for it",
    "output": "which writes its log or its output",
    "database": "which waits for a database",
    "network": "which waits for the network",
    "disk": "which reads or writes files",
    "checkpoint": "which saves a checkpoint",
    "garbage_collection": "which collects garbage",
    "recompilation": "which compiles again",
    "collective": "which waits in a collective",
    "python": "which computes",
    "operator": "",
    "kernel": "",
    "blocked": "which waits there, for what is not known",
    "gil": "which waits for the interpreter (the GIL), for it is held by thread",
    "descheduled": "it was ready to run and waited for a core",
    "stopped": "the whole process stood still",
    "cgroup_throttled": "its cgroup's CPU limit kept it from running",
    "page_faults": "which touches memory that is not there yet (page faults)",
    "memory_pressure": "it waited for memory",
    "gpu_throttled": "its GPU was behind the others, for its clock is lower",
    "unknown": "which runs or waits there: the system does not say",
}

NEXT_STEP: dict[str, str] = {
    "sleep": "Look at why that line sleeps, and on this rank alone.",
    "dataloader_workers": "Give the loader more workers, or look at what one does: py-spy dump --pid WORKER.",
    "lock": "Look at who holds what it waits for: the other threads are in the same file of stacks.",
    "subprocess": "Do what that program does in the process itself, or in a worker that stays.",
    "output": "Look at who reads it (a full pipe, a slow terminal or disk); log less, or by way of a QueueHandler.",
    "database": "Look at who else holds that database, and make one transaction of many rows.",
    "network": "Look at the network of this rank's host, and at what it fetches at that line.",
    "disk": "Look at this host's disk (iostat -x 1), and at whether the file can be kept in memory.",
    "checkpoint": "Save in the background, or have every rank save a part of it.",
    "garbage_collection": "Collect at the same step on all ranks: gc.disable(), and gc.collect() every so many steps.",
    "recompilation": "Look at what changes from step to step: TORCH_LOGS=recompiles says why it compiles again.",
    "collective": "The others of this collective are who to look at: compare their stacks.",
    "python": "Look at that function; a capture with with_stack counts its calls.",
    "operator": "Compare its inputs with the other rank's: a capture with record_shapes has them.",
    "kernel": "Compare its inputs with the other rank's (record_shapes), and the GPUs' clocks (sftriage evidence).",
    "blocked": "Look at the stacks of the other threads, in the same file, and at what that line calls.",
    "descheduled": "Look at what else runs on its host (top -H), or pin the rank to cores of its own.",
    "gil": "Move what that thread does to a process of its own, or have it let go of the interpreter.",
    "stopped": "Look at who stops it (SIGSTOP, cpulimit), and at the CPU limit of its cgroup (cpu.stat: nr_throttled).",
    "cgroup_throttled": "Raise that limit (cpu.max; in Kubernetes resources.limits.cpu), or run fewer threads.",
    "page_faults": "Keep what that line allocates for the next step (preallocate, reuse), or use larger pages.",
    "gpu_throttled": "Look at why its clock is lower: nvidia-smi -q -d PERFORMANCE,CLOCK,TEMPERATURE,POWER.",
    "memory_pressure": "Give its cgroup more memory (memory.high, memory.max), or run less in it.",
    "unknown": "Look at the trace, beside that of another rank: sftriage capture --rank N.",
}


COUNTED: dict[str, str] = {
    "cgroup_throttled": DOES["cgroup_throttled"],
    "stopped": DOES["stopped"],
    "page_faults": "it waited for pages of its memory to be read from disk",
    "memory_pressure": DOES["memory_pressure"],
    "descheduled": DOES["descheduled"],
    "disk": "it waited for a disk",
    "network": "its host waited to send TCP segments again",
    "gpu_throttled": DOES["gpu_throttled"],
}
"""What the kernel counted that no line of the program is needed for."""

COUNTED_STEP: dict[str, str] = {
    "page_faults": "See whether its host swaps (vmstat 1), and give it more memory.",
    "network": "Look at the network of this rank's host: nstat -az TcpRetransSegs, ip -s link.",
}

HOST_STEP = "Look at its host: clocks and temperature (nvidia-smi -q -d CLOCK,TEMPERATURE; turbostat)."
"""Where nothing says why a whole rank is slow."""
