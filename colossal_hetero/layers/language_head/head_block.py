"""The vocabulary-parallel head of a language model as a block, whose units are groups of rows of the vocabulary.

A rank that takes rows computes their logits and their part of the loss; what it adds to the gradient of X is summed
over the group anyway. So neither X nor logits are sent. It works in training passes in which the model itself computes
the loss, from ``labels``. A rank that is asked for the logits of such a pass computes those of its own rows then
(:mod:`.own_logits`). In other passes every rank computes the logits of its own rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import gcd
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import linear

from ..block import Block
from ..linear import HeteroVocabParallelLMHead1D
from ..unit_layout import UnitPlace
from ..workload import is_recorded, uncompiled
from .own_logits import OwnLogits, OwnRows
from .vocabulary_loss import VocabularyRows, accept_any_rows, end_expecting, expect_rows

__all__ = ["HeadBlock", "attach_head_blocks"]

MAX_UNITS = 64
"""The maximum number of units. The number is a power of two, and rows are mostly a multiple of 64."""


_COPIES = ("CloneBackward0", "ToCopyBackward0")
"""The nodes of operations that change no value, except by rounding."""


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
        self._fits: bool | None = None
        """Whether the model has shown that rows of its head can migrate; None: not yet."""
        self._outputs: Tensor | None = None
        """What the head returned in the current pass, in a pass that may decide whether units can migrate."""
        self._logits: OwnLogits | None = None
        """The logits of the current pass."""
        self._type: torch.dtype | None = None
        """The type of logits that the model returns."""
        self._unused: list[ReferenceType[OwnRows]] = []
        """Those of the logits since the last step that may still be asked for."""
        accept_any_rows()
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        layer.register_forward_hook(self._keep_outputs)

    @property
    def moves(self) -> bool:
        """Whether units can migrate: the model has computed a loss in training by Colossal-AI's function, and what the
        head returned were its logits."""
        return bool(self._fits) and super().moves

    @property
    def is_fixed(self) -> bool:
        """See ``Block.is_fixed``."""
        return self._fits is False or super().is_fixed

    @property
    def reshards(self) -> bool:
        """Never: in evaluation, loops use the logits of the rank's own rows."""
        return False

    def _assigned(self) -> None:
        self._rows = None
        if self.workload is not None:
            self._rows = VocabularyRows(self._numbers(), self._head.old_num_embeddings)
            self._shares[0].own_outputs = self._own_outputs

    def _own_outputs(self, x: Tensor) -> Tensor:
        columns, kind = self._head.num_valid_embeddings_local, self._type or x.dtype
        rows = OwnRows(lambda *operands: linear(*operands)[..., :columns].to(kind), x.detach(), self.parameters[0])
        self._unused.append(ref(rows))
        self._logits = OwnLogits.of(rows, (*x.shape[:-1], columns), kind, x.device)
        return self._logits

    def begin_iteration(self) -> None:
        """See ``Block.begin_iteration``. Logits that somebody may still ask for need the weights as they were."""
        super().begin_iteration()
        unused = [rows for reference in self._unused if (rows := reference()) is not None and rows.need_parameters]
        if unused:
            copies = [tensor.clone() for tensor in self.parameters[0]]
            for rows in unused:
                rows.use(copies)
        self._unused = []

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

    @uncompiled
    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        returns_dict = kwargs.get("return_dict")
        if returns_dict is None:
            returns_dict = getattr(getattr(model, "config", None), "use_return_dict", True)
        self._computes_loss = kwargs.get("labels") is not None and bool(returns_dict)
        expect_rows(self._rows if self._is_active(self._head) else None, self._head.clock)

    @uncompiled
    def _keep_outputs(self, head: nn.Module, args: Any, outputs: Tensor) -> None:
        if self._computes_loss and self._fits is None and outputs.grad_fn is not None:
            self._outputs = outputs

    @uncompiled
    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        outputs, self._outputs = self._outputs, None
        has_loss = end_expecting()
        if outputs is not None and model.training:
            logits = output.get("logits") if isinstance(output, Mapping) else None
            self._fits = has_loss and (logits is None or _is_copy(logits, outputs))
            self._type = None if logits is None else logits.dtype
        if not self._is_active(self._head):
            return
        if not has_loss or self._fits is False:
            raise RuntimeError(
                f"{type(model).__name__} computes its loss otherwise than by Colossal-AI's cross_entropy_1d, or "
                "changes the outputs of its head, so rows of the head cannot migrate; exclude it with "
                "BalanceConfig(head=False)"
            )
        if "logits" in output:
            output["logits"] = self._logits
        self._logits = None


def _is_copy(tensor: Tensor, of: Tensor) -> bool:
    """Whether one tensor, with gradients, has the values of another one, perhaps in another type."""
    node = tensor.grad_fn
    while node is not of.grad_fn and type(node).__name__ in _COPIES:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return node is of.grad_fn


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
