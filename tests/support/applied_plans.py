"""Training to which a test applies balancing plans itself, without a balancer that decides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.apply import Applier
from colossal_hetero.layers import hetero_layers
from colossal_hetero.layers.block import Block, attach_blocks
from colossal_hetero.layers.transport import Transport
from tests.support.training import batch, loss_of, ours, tiny_vit


class Training:
    """A tiny vision transformer on all ranks as one tensor-parallel group; tests apply plans to it themselves."""

    def __init__(
        self,
        method: str = "block",
        make_optimizer: Callable | None = None,
        priority: str = "norm-product",
        depth: int = 2,
    ) -> None:
        self.plugin = ours(tp_size=dist.get_world_size())
        model = tiny_vit(depth=depth)
        make_optimizer = make_optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
        self.booster = Booster(plugin=self.plugin)
        self.model, self.optimizer, *_ = self.booster.boost(model, make_optimizer(model.parameters()), loss_of)
        self.layers = hetero_layers(self.model)
        self.transport = Transport(self.plugin.tp_group)
        self.blocks: list[Block] = attach_blocks(self.model) if method == "block" else []
        config = BalanceConfig(mode="semi", migration=method, pruning=Pruning(priority=priority))
        self.applier = Applier(self.layers, self.blocks, config, 100, self.transport)
        self._start = self.parameters

    def steps(self, count: int) -> list[float]:
        """Train; returns the loss of every step."""
        losses = []
        for number in range(count):
            self.applier.units.begin_pass()
            images, labels = batch(number % 8)
            loss = loss_of(self.model(images), labels)
            self.booster.backward(loss, self.optimizer)
            self.applier.units.before_step()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.applier.end_iteration()
            losses.append(loss.item())
        return losses

    def reset(self) -> None:
        """Restore the initial state of parameters and optimizer."""
        for name, parameter in self.model.unwrap().named_parameters():
            parameter.data.copy_(self._start[name])
        self.optimizer.optim.state.clear()

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: parameter.detach().clone() for name, parameter in self.model.unwrap().named_parameters()}
