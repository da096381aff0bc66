"""Children of a trainer's forks: whatever they do and however they end, they change nothing of their parent's."""

import json
import os

import pytest

from sftriage.recorder import moments
from sftriage.windows.rings import open_ring

TRAINER = """
    import multiprocessing, os, subprocess, sys
    rings, form, made = sys.argv[1:]
    os.environ |= {"SFTRIAGE_RINGS": rings, "SFTRIAGE_RECORDER": form}
    held = {}
    # (before any hook of the recorder's: what it drops is finalized in the child while that is the parent's still)
    os.register_at_fork(after_in_child=held.clear)
    import torch
    from sftriage.seams import patches

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    if made == "auto":
        patches.imported("torch")

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return torch.ones(8)

    loader = torch.utils.data.DataLoader(Samples(), num_workers=1, multiprocessing_context="fork")

    def train():
        for batch in loader:
            net(batch).sum().backward()
            optimizer.step()

    def forked(act):
        child = os.fork()
        if not child:
            held.clear()
            act()
            sys.exit()
        assert os.waitpid(child, 0)[1] == 0

    def in_a_process():
        process = multiprocessing.get_context("fork").Process(target=train_alone)
        process.start()
        process.join()
        assert process.exitcode == 0

    def train_alone(steps=4):
        for _ in range(steps):
            net(torch.ones(1, 8)).sum().backward()
            optimizer.step()

    shapes = {
        "two epochs of workers": lambda: [train(), train()],
        "exit": lambda: forked(lambda: None),
        "_exit": lambda: forked(lambda: os._exit(0)),
        "train": lambda: forked(train_alone),
        "process": in_a_process,
        "preexec": lambda: subprocess.run(["true"], check=True, preexec_fn=held.clear),
    }
    if made == "by hand":
        from sftriage import Monitor
        held["monitor"] = Monitor()
        with held["monitor"].step():
            pass
    else:
        train_alone(30)
    assert sys.modules["sftriage.recorder.moments"].FORM.name.lower() == form
    print(flush=True)
    for name in iter(input, ""):
        shapes[name]()
        print(flush=True)
"""


@pytest.mark.parametrize("made", ["auto", "by hand"])
@pytest.mark.parametrize("form", ["c", "python"])
def test_a_child_changes_nothing_of_its_parents(train, until, rings, form, made):
    # GIVEN a trainer that is recorded
    if form == "c" and moments.FORM.name != "C":
        pytest.skip(moments.WHY_NOT_C)
    trainer = train(TRAINER, rings, form, made)
    trainer.says()
    there = sorted(path.name for path in rings.iterdir())
    assert "rank-0.0.asks" in there
    asks, answer = rings / "rank-0.0.asks", rings / "rank-0.0.stacks"
    with open_ring(rings / "rank-0.0.ring") as ring:
        for shape in ("exit", "_exit", "two epochs of workers", "process", "preexec", "train", "exit"):
            # WHEN it forks
            before = ring.status().published
            trainer.hears(shape)
            trainer.says()
            # THEN every file is there, the ring is open, and holds no step of the child's
            assert set(there) <= {path.name for path in rings.iterdir()}
            status = ring.status()
            assert (status.closed, status.alive) == (False, True)
            assert status.published - before == (8 if (shape, made) == ("two epochs of workers", "auto") else 0)
            # AND the trainer still says where it stands
            descriptor = os.open(asks, os.O_WRONLY | os.O_NONBLOCK)
            os.write(descriptor, f"{before}-{shape}\n".encode())
            os.close(descriptor)
            until(lambda said=f"{before}-{shape}": answer.exists() and json.loads(answer.read_text())["asked"] == said)
            answer.unlink()
        trainer.hears("")
        assert trainer.ends() == 0
        assert ring.status().closed
    assert not (rings / "rank-0.0.asks").exists()
