"""Data-parallel training in as little as it takes: DDP and torch's optimisers import torch's compiler, for seconds."""

import torch
import torch.distributed as dist


def average_gradients(model: torch.nn.Module) -> None:
    """All ranks have the mean of their gradients: here they meet."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def descend(model: torch.nn.Module) -> None:
    """A step of gradient descent."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 1e-3 * parameter.grad
            parameter.grad = None
