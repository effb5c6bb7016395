"""Optimizers that do not update each element on its own are found by a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import colossalai.nn.optimizer as colossalai_optimizers
import pytest
import timm.optim
import torch
import transformers
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from colossal_hetero.plugin.zero.elementwise_updates import ELEMENTWISE, check_sharding, why_not_sharded


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(70, 90), nn.LayerNorm(90), nn.Conv2d(3, 8, 3)])


class Renamed(torch.optim.SGD):
    """Elementwise, but not known."""


class WithClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        closure()
        return super().step()


class ByNorm(torch.optim.SGD):
    """Normalizes by the norm of all gradients."""

    def step(self, closure: Any = None) -> Any:
        gradients = [each.grad for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.norm() for each in gradients]).norm()
        for each in gradients:
            each.div_(norm)
        return super().step(closure)


def warming_up(parameters: Any) -> torch.optim.Optimizer:
    optimizer = Renamed(parameters, lr=0.1, momentum=0.9)
    LambdaLR(optimizer, lambda step: step / 10)  # 0 at first, and it replaces the method `step`
    return optimizer


def muon_for_matrices(parameters: Any) -> torch.optim.Optimizer:
    parameters = list(parameters)
    matrices = [each for each in parameters if each.dim() == 2]
    others = [each for each in parameters if each.dim() != 2]
    return timm.optim.Muon([dict(params=others, use_muon=False), dict(params=matrices)], lr=0.1)


SHARDED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "renamed": lambda parameters: Renamed(parameters, lr=0.1),
    "a schedule that begins with 0": warming_up,
    "Lion": timm.optim.Lion,
    "AdaBelief": timm.optim.AdaBelief,
    "MADGRAD": timm.optim.MADGRAD,
    "Lookahead of RAdam": lambda parameters: timm.optim.Lookahead(timm.optim.RAdamLegacy(parameters, lr=0.1)),
}
WHOLE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "torch's Adafactor": torch.optim.Adafactor,
    "transformers' Adafactor": transformers.optimization.Adafactor,
    "timm's Adafactor for vision": lambda parameters: timm.optim.AdafactorBigVision(parameters, lr=0.1),
    "timm's LAMB": lambda parameters: timm.optim.Lamb(parameters, lr=0.1),
    "LARS with decay": lambda parameters: timm.optim.Lars(parameters, lr=0.1, weight_decay=0.1),
    "LARS": lambda parameters: colossalai_optimizers.Lars(parameters, lr=0.1),
    "CAME": lambda parameters: colossalai_optimizers.CAME(parameters, lr=0.1),
    "Colossal-AI's Adafactor": lambda parameters: colossalai_optimizers.Adafactor(parameters, lr=0.1),
    "Muon": muon_for_matrices,
    "AdamP": lambda parameters: timm.optim.AdamP(parameters, lr=0.1),
    "NovoGrad": lambda parameters: timm.optim.NvNovoGrad(parameters, lr=0.1),
    "by the norm of all": lambda parameters: ByNorm(parameters, lr=0.1),
    "Lookahead of LAMB": lambda parameters: timm.optim.Lookahead(timm.optim.Lamb(parameters, lr=0.1)),
}
UNTRIED: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "L-BFGS": torch.optim.LBFGS,
    "with a closure": lambda parameters: WithClosure(parameters, lr=0.1),
    "for sparse gradients": torch.optim.SparseAdam,
}


def reason(make: Callable[..., torch.optim.Optimizer]) -> str | None:
    module = model()
    optimizer = make(module.parameters())
    state = len(optimizer.state)
    found = why_not_sharded(optimizer, distributed=True)
    for one, other in zip(module.parameters(), model().parameters(), strict=True):
        assert torch.equal(one, other)  # the trial has changed nothing
    assert len(optimizer.state) == state
    return found


def test_elementwise_optimizers_can_be_sharded() -> None:
    assert {name: reason(make) for name, make in SHARDED.items()} == dict.fromkeys(SHARDED)


def test_others_cannot() -> None:
    for name, make in WHOLE.items():
        assert "in another way than its parts" in str(reason(make)), name
    for name, make in UNTRIED.items():
        assert "cannot be tried" in str(reason(make)), name
    assert reason(torch.optim.Adagrad) == "it keeps states of whole parameters from the beginning"


def test_known_optimizers_pass_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    of_torch = [kind for kind in ELEMENTWISE if kind.__module__.startswith("torch.")]
    monkeypatch.setattr("colossal_hetero.plugin.zero.elementwise_updates.ELEMENTWISE", set())
    for kind in of_torch:
        assert reason(lambda parameters, kind=kind: kind(parameters, lr=0.1)) is None, kind  # type: ignore[misc]


def test_the_error_says_what_to_choose() -> None:
    with pytest.raises(ValueError) as error:
        check_sharding(torch.optim.Adafactor([nn.Parameter(torch.zeros(4, 4))]), "stage", 2, distributed=True)
    assert str(error.value) == (
        "Adafactor cannot be sharded by ZeRO (stage=2), because it updates a tensor of shape [4, 4] in another way "
        "than its parts, of which each rank has one; use stage=0, or an optimizer that updates each element on its "
        "own, such as AdamW"
    )
