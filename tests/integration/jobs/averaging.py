"""Data-parallel training in as little as it takes: DDP and torch's optimisers import torch's compiler, for seconds."""

import torch
import torch.distributed as dist


def average_gradients(model: torch.nn.Module) -> None:
    """All ranks have the mean of their gradients: here they meet."""
    gradients = [parameter.grad for parameter in model.parameters()]
    together = torch.cat([one.flatten() for one in gradients])
    dist.all_reduce(together)
    together /= dist.get_world_size()
    for one, part in zip(gradients, together.split([one.numel() for one in gradients]), strict=True):
        one.copy_(part.view_as(one))


def descend(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
            parameter.grad = None


class Layers(torch.nn.Module):
    """Two layers, between which the backward pass may be held up: by ``pause``, a hook, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
        self.pause = None

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.first(batch)
        if self.pause is not None:
            hidden.register_hook(self.pause)
        return self.second(hidden)
