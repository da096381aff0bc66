"""What is in the place of torch's own: the compiler of torch 2.2, which takes the hooks from optimizers' steps."""

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from sftriage.seams.replaced import keeping_hooks

PARAMETERS = [torch.nn.Parameter(torch.zeros(1))]


def an_optimizer():
    """A kind of optimizer that nobody has made one of."""

    class Optimizer(torch.optim.Optimizer):
        def __init__(self):
            super().__init__(PARAMETERS, {})

        def step(self):
            pass

    return Optimizer


@pytest.mark.parametrize(("keeps", "expected"), [(False, []), (True, ["early", "late"])])
def test_optimizers_keep_their_hooks_where_the_compiler_takes_them(keeps, expected):
    # GIVEN an optimizer whose class has its hooks, and a class that gets them with its first one
    early_kind, late_kind = an_optimizer(), an_optimizer()
    early, names, seen = early_kind(), {early_kind: "early", late_kind: "late"}, []
    handle = register_optimizer_step_post_hook(lambda one, *_: seen.append(names[type(one)]))

    def takes_hooks():
        # (in words of ours what that compiler does)
        early_kind.step = early_kind.step.__wrapped__
        early_kind.step.hooked = late_kind.step.hooked = True

    # WHEN the compiler comes
    (keeping_hooks(takes_hooks) if keeps else takes_hooks)()
    early.step()
    late_kind().step()
    handle.remove()
    # THEN
    assert seen == expected


def test_what_the_compiler_leaves_alone_stays_as_it_is():
    # GIVEN a compiler of later versions WHEN it comes
    kind = an_optimizer()
    kind()
    before = kind.step
    assert keeping_hooks(lambda: "answer")() == "answer"
    # THEN
    assert kind.step is before
