"""Colossal-AI's tensor-parallel linear layers, able to do less than their full share of the work.

Each class is Colossal-AI's own with :class:`HeteroLinear` mixed in: same constructor, parameters, ``state_dict`` and
options. A layer that was told nothing runs its parent's ``forward``. Once it has a clock, a slow_down or a workload it
runs :func:`~colossal_hetero.layers.product.parallel_product` instead, which computes the same thing the same way.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch.distributed as dist
from colossalai.shardformer.layer import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
)
from colossalai.shardformer.layer._operation import (
    gather_forward_split_backward,
    reduce_forward,
    split_forward_gather_backward,
)
from colossalai.shardformer.layer.qkv_fused_linear import (
    gather_forward_split_backward_fused_qkv,
    split_forward_gather_backward_fused_qkv,
)
from colossalai.shardformer.layer.utils import is_share_sp_tp
from torch import Tensor, nn

from .column_migration import ColumnMigration, MigratedProductContext, migrated_product
from .product import CONV1D_LAYOUT, LINEAR_LAYOUT, ProductContext, WeightLayout, parallel_product
from .unit_layout import UnitShare
from .workload import Clock, Lineage, Part, Slowdown, Workload, is_recorded, matrix_view

__all__ = [
    "HeteroFusedLinear1D_Col",
    "HeteroFusedLinear1D_Row",
    "HeteroGPT2FusedLinearConv1D_Col",
    "HeteroGPT2FusedLinearConv1D_Row",
    "HeteroLinear",
    "HeteroLinear1D_Col",
    "HeteroLinear1D_Row",
    "hetero_layers",
]


class LayerBlock(Protocol):
    """What a layer needs of the block that it is a part of; see :class:`~colossal_hetero.layers.block.Block`."""

    @property
    def workload(self) -> object | None:
        """None while every rank computes its own units."""

    def share_of(self, layer: HeteroLinear) -> UnitShare | None:
        """What ``layer`` computes in the running forward pass; None for its own units."""


class HeteroLinear:
    """What the six layers add to their parents: a workload, a clock and a slow_down, all absent at first."""

    clock: Clock | None = None
    """Told when each part of the forward and backward pass ends."""
    slow_down: Slowdown | None = None
    """Slows the products, in experiments."""
    rows = 0
    """Rows multiplied in training forward passes so far."""
    passes = 0
    """How many passes that were."""
    block: LayerBlock | None = None
    """The block that the layer is a part of; its workload goes before the layer's own."""

    _layout: WeightLayout = LINEAR_LAYOUT
    _column_parallel: bool
    _workload: Workload | None = None
    _migration: ColumnMigration | None = None
    _lineage: Lineage | None = None
    _previous: dict[tuple[str, int], Tensor]

    @classmethod
    def from_native_module(cls, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Colossal-AI's conversion of ``module``; a layer with fewer features than ranks comes back as it was."""
        layer = super().from_native_module(module, *args, **kwargs)  # type: ignore[misc]
        if layer is not module:
            layer.__class__ = cls
        return layer

    @property
    def workload(self) -> Workload | None:
        return self._workload

    def assign(self, workload: Workload | None, migration: ColumnMigration | None = None) -> None:
        """Take on ``workload`` from the next training forward on, or, with None, the full share again.

        With ``migration``, which must come to all ranks of the group at once, columns of this rank or others are
        computed elsewhere; what the workload prunes is chosen from the columns that stay.

        Raises:
            ValueError: the layer has an option that balancing cannot be combined with.
        """
        if (workload or migration) is not None and (obstacle := self.resize_obstacle()) is not None:
            raise ValueError(f"{type(self).__name__} cannot be balanced with {obstacle}; do without one of them")
        self._workload = workload
        self._migration = migration
        self._previous = {}
        self.begin_iteration()

    def begin_iteration(self) -> None:
        """Choose columns anew at the next forward; those of the finished iteration are forgotten."""
        self._lineage = None

    def resize_obstacle(self) -> str | None:
        """The option of this layer that balancing cannot be combined with, as ``name=value``, or None."""
        if is_share_sp_tp(self.seq_parallel_mode):  # type: ignore[attr-defined]
            return f"seq_parallel_mode={self.seq_parallel_mode!r}"  # type: ignore[attr-defined]
        for option in ("use_zbv", "fp8_communication"):
            if getattr(self, option):
                return f"{option}=True"
        if getattr(self, "stream_chunk_num", 1) > 1:
            return f"stream_chunk_num={self.stream_chunk_num}"  # type: ignore[attr-defined]
        return None

    def block_obstacle(self) -> str | None:
        """Why the layer cannot be a part of a block, as ``name=value``, or None."""
        for option, value in (("gather_output", True), ("skip_bias_add", True), ("parallel_input", False)):
            if getattr(self, option, not value) is value:
                return f"{option}={value}"
        return self.resize_obstacle()

    @property
    def is_column_parallel(self) -> bool:
        """Whether ranks divide the outputs; else they divide the inputs."""
        return self._column_parallel

    @property
    def output_dim(self) -> int:
        """The dimension of the weight that counts this rank's outputs."""
        return 1 - self._layout.columns

    @property
    def contraction_columns(self) -> int:
        """``L``, the columns of this rank's weight that a workload's pruning ratio is a share of."""
        return self.weight.shape[self._layout.columns]  # type: ignore[attr-defined]

    @property
    def matrix(self) -> Tensor:
        """This rank's weight as a view ``[N, L]``, without gradient."""
        return self._layout.as_matrix(self.weight.detach())  # type: ignore[attr-defined]

    @property
    def kept_columns(self) -> Tensor | None:
        """The columns kept in the current iteration, int64 ``[count]``, or None while all are."""
        return None if self._lineage is None else self._lineage.kept

    def _passes_through(self) -> bool:
        """Whether the parent's own forward is to run."""
        told = self._workload is not None or self._migration is not None
        if not (told or self.clock or self.slow_down or (self.block is not None and self.block.workload is not None)):
            return True
        return self.resize_obstacle() is not None

    def _multiply(self, x: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        layer: Any = self
        if layer.training:
            self.rows += x.numel() // x.shape[-1]
            self.passes += 1
        migration = self._migration if self._migration is not None and self._is_balanced() else None
        lineage = self._columns_for(x)
        if migration is not None:
            column_parallel = self._column_parallel
            return migrated_product(
                x,
                layer.weight,
                bias,
                MigratedProductContext(
                    self._layout, migration, column_parallel, group, lineage, self.clock, self.slow_down
                ),
            )
        between: Part = "other" if self.block is None else "block"
        how = ProductContext(
            self._layout,
            group,
            lineage,
            None if self.block is None else self.block.share_of(self),
            self.clock,
            self.slow_down,
            before_forward="other" if self._column_parallel else between,
            before_backward=between if self._column_parallel else "other",
        )
        return parallel_product(x, layer.weight, bias, how)

    def _is_balanced(self) -> bool:
        """Whether what the layer was told holds for the running forward pass: one whose gradients are asked for."""
        return self.training and is_recorded()  # type: ignore[attr-defined]

    def _columns_for(self, x: Tensor) -> Lineage | None:
        workload = self._workload
        if workload is None or workload.prune == 0 or not self._is_balanced():
            return None
        if self._lineage is None:
            given = 0 if self._migration is None else self._migration.given
            rest = self.contraction_columns - given
            count = max(1, workload.kept_count(self.contraction_columns) - given)
            if count == rest:
                return None
            kept = workload.select(matrix_view(x.detach())[:, :rest], self.matrix[:, :rest], count)
            self._lineage = Lineage(kept, workload.imputation, self._previous)
        return self._lineage

    def _mark(self, part: Any) -> None:
        if self.clock is not None:
            self.clock.mark(part)


class _HeteroColumnParallel(HeteroLinear):
    """Weight ``[N/e, K]``: X replicated, no communication in forward, dX summed over the group in backward."""

    _column_parallel = True

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self._passes_through():
            return super().forward(input_)  # type: ignore[misc]
        layer: Any = self
        y = self._multiply(input_, None if layer.skip_bias_add else layer.bias, layer.process_group)
        if layer.gather_output:
            y = self._gather(y)
            self._mark("communication")
        return (y, layer.bias) if layer.skip_bias_add else y

    def _gather(self, y: Tensor) -> Tensor:
        return gather_forward_split_backward(y, dim=-1, process_group=self.process_group)  # type: ignore[attr-defined]


class _HeteroRowParallel(HeteroLinear):
    """Weight ``[N, K/e]``: Y summed over the group in forward, no communication in backward."""

    _column_parallel = False

    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if self._passes_through():
            return super().forward(input_)  # type: ignore[misc]
        layer: Any = self
        if not layer.parallel_input:
            input_ = self._split(input_)
        y = reduce_forward(self._multiply(input_, None, None), layer.process_group)
        self._mark("communication")
        if layer.skip_bias_add:
            return y, layer.bias
        return y if layer.bias is None else y + layer.bias

    def _split(self, x: Tensor) -> Tensor:
        return split_forward_gather_backward(x, dim=-1, process_group=self.process_group)  # type: ignore[attr-defined]


class HeteroLinear1D_Col(_HeteroColumnParallel, Linear1D_Col):
    """Column-parallel ``torch.nn.Linear``; see Colossal-AI's ``Linear1D_Col`` for the arguments."""


class HeteroLinear1D_Row(_HeteroRowParallel, Linear1D_Row):
    """Row-parallel ``torch.nn.Linear``; see Colossal-AI's ``Linear1D_Row`` for the arguments."""


class HeteroFusedLinear1D_Col(_HeteroColumnParallel, FusedLinear1D_Col):
    """Column-parallel fused linear layer (q, k and v in one weight); see Colossal-AI's ``FusedLinear1D_Col``."""

    def _gather(self, y: Tensor) -> Tensor:
        return gather_forward_split_backward_fused_qkv(y, self.split_sizes, self.process_group)


class HeteroFusedLinear1D_Row(_HeteroRowParallel, FusedLinear1D_Row):
    """Row-parallel fused linear layer; see Colossal-AI's ``FusedLinear1D_Row``."""

    def _split(self, x: Tensor) -> Tensor:
        return split_forward_gather_backward_fused_qkv(x, self.split_sizes, self.process_group)


class HeteroGPT2FusedLinearConv1D_Col(_HeteroColumnParallel, GPT2FusedLinearConv1D_Col):
    """Column-parallel ``Conv1D`` of GPT-2, weight ``[K, N/e]``; see Colossal-AI's ``GPT2FusedLinearConv1D_Col``."""

    _layout = CONV1D_LAYOUT

    def _gather(self, y: Tensor) -> Tensor:
        return gather_forward_split_backward_fused_qkv(y, self.split_sizes, self.process_group)


class HeteroGPT2FusedLinearConv1D_Row(_HeteroRowParallel, GPT2FusedLinearConv1D_Row):
    """Row-parallel ``Conv1D`` of GPT-2, weight ``[K/e, N]``; see Colossal-AI's ``GPT2FusedLinearConv1D_Row``."""

    _layout = CONV1D_LAYOUT


def hetero_layers(model: nn.Module) -> dict[str, HeteroLinear]:
    """The layers of ``model`` that can be told a workload, by qualified name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HeteroLinear)}
