"""The vocabulary-parallel head of a language model as a block, whose units are groups of rows of the vocabulary.

A rank that takes rows computes their logits and their part of the loss; what it adds to the gradient of X is summed
over the group anyway. So neither X nor logits are sent. It works in training passes in which the model itself computes
the loss, from ``labels``. In other passes every rank computes the logits of its own rows.
"""

from __future__ import annotations

import inspect
from math import gcd
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..block import Block
from ..linear import HeteroVocabParallelLMHead1D
from ..unit_layout import UnitPlace
from ..workload import is_recorded
from .vocabulary_loss import VocabularyRows, accept_any_rows, expect_rows

__all__ = ["HeadBlock", "attach_head_blocks"]

MAX_UNITS = 64
"""The maximum number of units. The number is a power of two, and rows are mostly a multiple of 64."""


class MigratedLogits:
    """Takes the place of logits that are divided over the ranks by a plan."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the logits of this training pass have no {name!r}: a plan divides the vocabulary over the ranks in other "
            "parts than Colossal-AI does. Use the loss, compute logits without labels or in evaluation, or exclude the "
            "head with BalanceConfig(head=False)"
        )


class HeadBlock(Block):
    """The head of a language model.

    Args:
        name: its qualified name.
        head: the layer, whose outputs are not gathered.
        model: the module whose forward pass computes the logits and, given ``labels``, the loss.
    """

    def __init__(self, name: str, head: HeteroVocabParallelLMHead1D, model: nn.Module) -> None:
        layer: Any = head
        rows = layer.weight.shape[0]
        units = gcd(rows, MAX_UNITS)
        place = UnitPlace(0, 1, units, rows // units)
        super().__init__(name, (), head, [[place] if layer.bias is None else [place, place]], None, ())
        self._head = layer
        self._rows: VocabularyRows | None = None
        self._computes_loss = False
        self._has_computed_loss = False
        accept_any_rows()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)

    @property
    def moves(self) -> bool:
        """Whether units can migrate: the model has computed a loss in training."""
        return self._has_computed_loss

    @property
    def reshards(self) -> bool:
        """Never: in evaluation, loops use the logits of the rank's own rows."""
        return False

    def _assigned(self) -> None:
        self._rows = None if self.workload is None else VocabularyRows(self._numbers(), self._head.old_num_embeddings)

    def _is_active(self, layer: Any) -> bool:
        # In evaluation the rank's own rows are computed, because loops use the logits there.
        return self._computes_loss and is_recorded() and super()._is_active(layer)

    def _numbers(self) -> Tensor:
        """The rows of the vocabulary of each logit while the workload applies."""
        assert self.workload is not None
        rows, size = self._head.weight.shape[0], self.places[0][0].size
        rank = dist.get_rank(self._head.process_group)
        return torch.cat(
            [
                torch.arange(owner * rows + start * size, owner * rows + stop * size, device=self._head.weight.device)
                for owner, start, stop in self.workload.units_of(rank)
            ]
        )

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        returns_dict = kwargs.get("return_dict")
        if returns_dict is None:
            returns_dict = getattr(getattr(model, "config", None), "use_return_dict", True)
        self._computes_loss = kwargs.get("labels") is not None and bool(returns_dict)
        self._has_computed_loss |= self._computes_loss and model.training
        expect_rows(self._rows if self._is_active(self._head) else None, self._head.clock)

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        if not self._is_active(self._head):
            return
        if expect_rows(None):
            raise RuntimeError(
                f"{type(model).__name__} computes its loss otherwise than by Colossal-AI's cross_entropy_1d, so rows "
                "of its head cannot migrate; exclude the head with BalanceConfig(head=False)"
            )
        if "logits" in output:
            output["logits"] = MigratedLogits()


def attach_head_blocks(model: nn.Module) -> list[Block]:
    """Connect the heads of ``model`` that feed a vocabulary-parallel loss to blocks; call it once per model."""
    blocks: list[Block] = []
    for name, head in list(model.named_modules()):
        if not isinstance(head, HeteroVocabParallelLMHead1D) or head.block is not None:
            continue
        owner = model.get_submodule(name.rpartition(".")[0])
        if "labels" not in inspect.signature(owner.forward).parameters:
            continue
        if head.block_obstacle() is None and head.sequence_parts is None:
            blocks.append(HeadBlock(name, head, owner))
    return blocks
