"""Ranks that reduce gradients around a straggler, and say whether the sums are right. In as many ranks as launched.

``stragglar_ranks.py sums|groups|ddp|hooked|releases``, as a launcher starts them; ``killed|stopped``, which meet in
MEETING, and ``voting``, where one is killed between its vote for a straggler and the round from which that one was to
be known, and ``across`` and ``casting``, where each rank is a host: one is killed then, or once its vote is on its way.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count, product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sftriage.errors import UsageError
from sftriage.mitigate import switching
from sftriage.mitigate.stragglar import Stragglar, attach, stragglar_hook
from sftriage.mitigate.switching import MultiHostSwitch, SwitchFile, find_switches

SIZES = (1, 5, 1000, 4099)
WITHIN = {torch.float32: 1e-6, torch.bfloat16: 0.05}
"""How far sums of some few numbers of about 1 are apart where they are added up in another order."""
LOST_TIMEOUT_S = 10
LOST = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


def in_order(gradients: list[torch.Tensor], straggler: int) -> torch.Tensor:
    """The mean, added up in the order in which the ranks of an exchange add up."""
    n = len(gradients)
    means = [one / n for one in gradients]
    late = means.pop(straggler)
    chunks = []
    for owner, parts in enumerate(
        zip(*(one.tensor_split(n - 1) for one in means), late.tensor_split(n - 1), strict=True)
    ):
        total = parts[owner].clone()
        for distance in range(1, n - 1):
            total += parts[(owner - distance) % (n - 1)]
        chunks.append(total + parts[-1])
    return torch.cat(chunks)


def sums() -> None:
    """Every rank as the straggler, and nobody, one after the other; gradients of several sizes, some of them queued."""
    rank, n = dist.get_rank(), dist.get_world_size()
    state = Stragglar()
    for straggler in (*range(n), None):
        state.switch(straggler if rank == 0 else 0)  # the first rank's word holds
        assert state.straggler == straggler
        of_all = [
            [torch.randn(size, generator=torch.Generator().manual_seed(n * size + one)).to(dtype) for one in range(n)]
            for size, dtype in product(SIZES, WITHIN)
        ]
        pending = [state.start(gradients[rank].clone()) for gradients in of_all]
        for gradients, future in zip(of_all, pending, strict=True):
            mean = future.wait()
            torch.testing.assert_close(mean, torch.stack(gradients).mean(0), rtol=1e-5, atol=WITHIN[mean.dtype])
            if straggler is not None:
                assert torch.equal(mean, in_order(gradients, straggler))
    for none in (n, -1):
        try:
            state.switch(none)
        except UsageError as error:
            assert f"straggler {none} is not among {n} ranks" in str(error)  # noqa: PT017
        else:
            raise AssertionError("a straggler that is not there")


def groups() -> None:
    """Two groups side by side, each with a straggler of its own."""
    rank, n = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(list(range(first, n, 2))) for first in range(2)]
    state = Stragglar(halves[rank % 2])
    state.switch(rank % 2)
    mean = state.start(torch.full((100,), float(rank))).wait()
    assert torch.equal(mean, torch.full((100,), (n - 2) / 2 + rank % 2))


def ddp() -> None:
    """A model trained around a straggler that moves is the one trained as torch does."""
    rank, n = dist.get_rank(), dist.get_world_size()

    def trained(*, around: bool) -> list[torch.Tensor]:
        torch.manual_seed(3)
        layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
        model = DistributedDataParallel(layers, bucket_cap_mb=0.01, gradient_as_bucket_view=around)
        state = Stragglar()
        if around:
            model.register_comm_hook(state, stragglar_hook)
        else:
            assert attach(model) is None, "nobody watches this job"
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            if around:
                state.switch(None if step == 0 else step % n)
            torch.manual_seed(100 * step + rank)
            optimizer.zero_grad()
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in layers.parameters()]

    mine = trained(around=True)
    for parameter, reference in zip(mine, trained(around=False), strict=True):
        torch.testing.assert_close(parameter, reference, rtol=1e-5, atol=1e-6)
    # Copies of a model stay the same to the last bit.
    flat = torch.cat([one.flatten() for one in mine])
    of_first = flat.clone()
    dist.broadcast(of_first, 0)
    assert torch.equal(flat, of_first)


def lost(how: str) -> None:
    """A rank is gone where the others switch: they fail, as in any collective of torch's, and do not wait for ever."""
    state = Stragglar(timeout=timedelta(seconds=LOST_TIMEOUT_S))
    state.switch(1)
    state.start(torch.ones(10)).wait()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), LOST[how])
    state.switch(2)
    state.start(torch.ones(10)).wait()


def voting(how: str) -> None:
    """Rank 1 is killed once all have voted, before it switches: the others fail in their exchange, as without."""
    rings = Path(os.environ["SFTRIAGE_RINGS"])
    if how != "voting":
        # (each rank is a host, with a directory of rings of its own, and votes in each round)
        switching.VOTES_APART_NS = 0
        rings /= os.environ["RANK"]
        rings.mkdir()
        os.environ["SFTRIAGE_RINGS"] = str(rings)
    model = DistributedDataParallel(nn.Linear(8, 8))
    state = attach(model, timedelta(seconds=LOST_TIMEOUT_S))
    assert state is not None
    assert isinstance(state._switch, MultiHostSwitch) == (how != "voting")
    is_first, is_second = dist.get_rank() == 0, dist.get_rank() == 1
    if how == "casting" and is_second:
        cast = state._switch.cast

        def then_killed(words: Sequence[int]) -> Callable[[], Sequence[int]]:
            counted = cast(words)
            if words[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return counted

        state._switch.cast = then_killed
    (path,) = find_switches(rings)
    file, due = SwitchFile(path), None
    for rounds in count(1):
        if rounds == 3 and (is_first or how != "voting"):
            file.write_request(file.status().next_request(3))
        dist.barrier()
        if rounds == 3:
            due = file.status().request.round if how == "voting" else 4
        if rounds == due and is_second:
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(8)).sum().backward()
        assert (state.straggler == 2) == (due is not None and rounds >= due)


def warnings() -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("sftriage").addHandler(handler)
    return said


def hooked() -> None:
    """What is no DDP, or has a hook of its own, stays as it is, and trains on."""
    said = warnings()
    assert attach(nn.Linear(8, 8)) is None
    model = DistributedDataParallel(nn.Linear(8, 8))
    model.register_comm_hook(None, fp16_compress_hook)
    assert attach(model) is None
    model(torch.ones(8)).sum().backward()
    assert [one.startswith("sftriage: gradients are reduced as before: ") for one in said] == [True, True]
    assert "not Linear" in said[0]
    assert "called once" in said[1]


def releases() -> None:
    """A rank has another release: no rank takes the hook in, the first says so, training goes on."""
    said, rank = warnings(), dist.get_rank()
    model = DistributedDataParallel(nn.Linear(8, 8))
    switching.__version__ += ".1" * (rank == 1)
    assert attach(model, timedelta(seconds=LOST_TIMEOUT_S)) is None
    for _ in range(3):
        model(torch.ones(8)).sum().backward()
    assert len(said) == (rank == 0)
    assert all(one.startswith("sftriage: gradients are reduced as before: ") for one in said)
    assert all("incompatible releases" in one for one in said)
    assert not list(Path(os.environ["SFTRIAGE_RINGS"]).glob("*.switch"))


if __name__ == "__main__":
    what = sys.argv[1]
    where = {"init_method": f"file://{os.environ['MEETING']}"} if "MEETING" in os.environ else {}
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]), **where)
    if what in (*LOST, "voting", "across", "casting"):
        try:
            (lost if what in LOST else voting)(what)
        except RuntimeError as error:
            sys.stdout.write(f"failed: {error}\n")
            raise
    else:
        {"sums": sums, "groups": groups, "ddp": ddp, "hooked": hooked, "releases": releases}[what]()
        dist.barrier()
        sys.stdout.write("right\n")
        sys.stdout.flush()
    # Gloo's threads may outlive their group; there is nothing left to do for them.
    os._exit(0)
