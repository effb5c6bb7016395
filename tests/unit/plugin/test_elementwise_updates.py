"""Only optimizers that are known to update each element on its own are sharded."""

from __future__ import annotations

from typing import Any

import pytest
import timm.optim
import torch
from colossalai.interface import OptimizerWrapper
from colossalai.nn.optimizer import Lamb
from torch.nn import Parameter

from colossal_hetero.plugin.zero.elementwise_updates import ELEMENTWISE, can_be_sharded, check_sharding

VALUES = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Own(torch.optim.SGD):
    """Elementwise, but not known."""


class Known(torch.optim.SGD):
    is_elementwise = True


class Derived(Known):
    """Not known either: it may do something else."""


def updated(kind: Any, values: torch.Tensor) -> torch.Tensor:
    parameter = Parameter(values.clone())
    optimizer = kind([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = 3 * parameter.detach() + 1
        optimizer.step()
    return parameter.detach()


KINDS = sorted((each for each in ELEMENTWISE if "colossalai" not in each.__module__), key=lambda each: each.__name__)


@pytest.mark.parametrize("kind", KINDS)
def test_known_optimizers_update_a_tensor_as_its_parts(kind: Any) -> None:
    parts = [updated(kind, part) for part in VALUES.flatten().split(7)]
    assert torch.allclose(torch.cat(parts), updated(kind, VALUES).flatten(), rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "distributed", "expected"),
    [
        (torch.optim.AdamW, False, True),
        (Known, False, True),
        (Own, True, False),
        (Derived, True, False),
        (Lamb, True, True),
        (Lamb, False, False),
        (torch.optim.Adafactor, True, False),
        (torch.optim.Adagrad, True, False),  # its states exist from the beginning
        (timm.optim.Muon, True, False),
    ],
)
def test_others_must_say_so(kind: Any, distributed: bool, expected: bool) -> None:
    optimizer = kind([Parameter(VALUES)], lr=0.1)
    assert (
        can_be_sharded(optimizer, distributed) is can_be_sharded(OptimizerWrapper(optimizer), distributed) is expected
    )


def test_the_error_says_what_to_choose() -> None:
    with pytest.raises(ValueError, match=r"Own cannot be sharded by ZeRO \(stage=2\).*use stage=0.*Own.is_elementwise"):
        check_sharding(Own([Parameter(VALUES)], lr=0.1), "stage", 2, distributed=True)
