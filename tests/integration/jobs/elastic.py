"""``elastic.py DIRECTORY``: trains under torchrun, whoever of it dies, until DIRECTORY/release is there.

What its ranks do is told by other files there: ``die-HOST`` ends the ranks on a host once, ``slow-HOST`` has a stage
and the seconds by which each of their steps is longer in it, and ``checkpoint`` the step from which on a job goes on. A
rank that loses the others waits for its launcher to end it, or leaves, if there is a file ``leave``. In ``started``
every rank notes that it has taken a step, together with which others, as JSON.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from averaging import average_gradients, descend

import sftriage

CHECKPOINT_STEPS, STEP_S, DIED = 100, 0.015, 7


class Orders:
    """What the files of a directory say of this rank."""

    def __init__(self, directory: Path) -> None:
        host = os.uname().nodename
        self._release, self._checkpoint = directory / "release", directory / "checkpoint"
        self._die, self._slow = directory / f"die-{host}", directory / f"slow-{host}"

    @property
    def ends(self) -> bool:
        return self._release.exists()

    @property
    def resumed_from(self) -> int:
        return int(self._checkpoint.read_text()) if self._checkpoint.exists() else 0

    def save(self, step: int) -> None:
        partial = self._checkpoint.with_suffix(".new")
        partial.write_text(str(step))
        partial.rename(self._checkpoint)

    def note(self, **about: int) -> None:
        variables = {"rank": "RANK", "world_size": "WORLD_SIZE", "restarts": "TORCHELASTIC_RESTART_COUNT"}
        about |= {name: int(os.environ[variable]) for name, variable in variables.items()}
        with (self._release.parent / "started").open("a") as file:
            file.write(json.dumps({"host": os.uname().nodename, "pid": os.getpid(), **about}) + "\n")

    def obey(self, stage: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            slow, seconds = self._slow.read_text().split()
            if slow == stage:
                time.sleep(float(seconds))
        if self._die.exists():
            self._die.unlink()
            os._exit(DIED)


def main() -> None:
    orders = Orders(Path(sys.argv[1]))
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 64)
    dist.init_process_group("gloo")
    # (the checkpoint is read by one, and who is together is known by a number that one makes up)
    first = torch.tensor([orders.resumed_from, int.from_bytes(os.urandom(6), "little")])
    dist.broadcast(first, 0)
    step, ends = int(first[0]), torch.zeros(())
    with sftriage.Monitor(("data", "forward", "backward", "optimizer"), ("backward",)) as monitor:
        while not ends:
            with monitor.step(step):
                with monitor.stage("data"):
                    batch = torch.randn(8, 64)
                    orders.obey("data")
                with monitor.stage("forward"):
                    loss = model(batch).square().mean()
                    time.sleep(STEP_S)
                    orders.obey("forward")
                with monitor.stage("backward"):
                    loss.backward()
                    average_gradients(model)
                    # The ranks have to leave at the same step: the first one says so.
                    ends = torch.tensor(float(dist.get_rank() == 0 and orders.ends))
                    dist.broadcast(ends, 0)
                with monitor.stage("optimizer"):
                    descend(model)
            if step == first[0]:
                orders.note(together=int(first[1]), step=step)
            step += 1
            if dist.get_rank() == 0 and step % CHECKPOINT_STEPS == 0:
                orders.save(step)
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        # (under NCCL it would wait for them)
        while not (Path(sys.argv[1]) / "leave").exists():
            time.sleep(0.1)
        sys.exit(1)
