"""The message that all ranks exchange before the optimizer steps: a step happens on all of them or on none.

[Note: commit] It carries what all must know: the norm of all gradients, whether a gradient is not finite, and which
parameters got a gradient anywhere. No rank steps before it has the sum over the world. So if any rank has stepped,
every rank had its complete gradients. If a rank does not read the sum, a GPU steps after it, and the host goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["NOTHING", "Commit", "exchange"]


@dataclass(frozen=True)
class Commit:
    """What all ranks know before a step."""

    gradient_norm: float
    """Over all parameters of the model, of gradients as they are: with fp16 multiplied by the loss scale."""
    overflow: bool
    """Whether a gradient of any rank is infinite or not a number."""
    unused: frozenset[int]
    """Numbers of parameters that got no gradient on any rank."""
    words: tuple[float, ...] = ()
    """Sums of the further numbers that ranks send along."""


NOTHING = Commit(0.0, False, frozenset())


def exchange(
    squared_norm: Tensor, has_gradient: Sequence[bool], is_read: bool = True, words: Sequence[float] = ()
) -> Commit:
    """Sum up what the ranks tell. Called by all ranks at once.

    Args:
        squared_norm: float64, ``[]``, of the gradients that this rank counts; each element of the model is counted by
            one rank. Not finite if one of these gradients is not.
        has_gradient: by parameter of the model, whether this rank had a gradient before the sums.
        is_read: whether this rank uses the result. If not, it does not wait for it, and gets :data:`NOTHING`.
        words: further numbers, equally many on all ranks.
    """
    overflow = ~squared_norm.isfinite()
    # Each rank has a place of its own, because the sum must be the same whichever rank computes what.
    squares = squared_norm.new_zeros(dist.get_world_size())
    squares[dist.get_rank()] = squared_norm.where(~overflow, 0.0)
    # From pinned memory, so that the host does not wait for a GPU.
    flags = torch.tensor([*words, *has_gradient], dtype=torch.float64, pin_memory=squares.is_cuda)
    flags = flags.to(squares.device, non_blocking=True)
    message = torch.cat([overflow.double()[None], flags, squares])
    dist.all_reduce(message)
    if not is_read:
        return NOTHING
    overflows, *rest = message.tolist()
    sums, counts = tuple(rest[: len(words)]), rest[len(words) : len(flags)]
    norm = math.inf if overflows else math.sqrt(math.fsum(rest[len(flags) :]))
    return Commit(norm, overflows > 0, frozenset(number for number, count in enumerate(counts) if count == 0), sums)
