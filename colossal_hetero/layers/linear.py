"""Colossal-AI's tensor-parallel linear layers, able to do less than their full share of the work: :class:`HeteroLinear`
mixed into its classes, with the same constructor, parameters, ``state_dict`` and options. Without a workload, clock and
slowdown the parent's ``forward`` runs, otherwise :func:`.parallel_product`, which computes the same."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import (
    FusedLinear1D_Col,
    FusedLinear1D_Row,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    VocabParallelLMHead1D,
)
from colossalai.shardformer.layer._operation import gather_forward_split_backward, split_forward_gather_backward
from colossalai.shardformer.layer.qkv_fused_linear import (
    gather_forward_split_backward_fused_qkv,
    split_forward_gather_backward_fused_qkv,
)
from colossalai.shardformer.layer.utils import is_share_sp_tp
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from .column_migration import ColumnMigration, MigratedProductContext, migrated_product
from .product import ProductContext, SequenceParts, parallel_product, sum_outputs, sum_parts
from .unit_layout import CONV1D_LAYOUT, LINEAR_LAYOUT, WeightLayout
from .workload import Clock, Lineage, Slowdown, Workload, is_recorded, matrix_view, traced, uncompiled, values_of

_OF_BALANCING = {"clock", "slow_down", "kind", "block", "workload", "_migration", "_lineage", "_previous"}


class HeteroLinear:
    """Additions of the seven layers to their parents: a workload, a clock and a slowdown, all absent at first."""

    clock: Clock | None = None
    slow_down: Slowdown | None = None
    rows = 0  # rows of X multiplied in training forward passes so far
    passes = 0
    kind: int | None = None  # layers of one kind are balanced in the same way; None: this layer is not balanced
    block: Any = None
    """The :class:`.Block` that contains the layer, if any; its workload takes precedence over the layer's."""
    workload: Workload | None = None
    _layout: WeightLayout = LINEAR_LAYOUT
    column_parallel: bool
    _migration: ColumnMigration | None = None
    _lineage: Lineage | None = None
    _previous: dict[tuple[str, int], Tensor]

    @classmethod
    def from_native_module(cls, module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert ``module`` as Colossal-AI does; a layer with fewer features than ranks is returned unchanged."""
        if isinstance(module, BaseTunerLayer):
            raise ValueError(
                f"a layer with {type(module).__module__.split('.')[-2]} adapters has no tensor-parallel form in "
                "Colossal-AI, which would drop the adapters; use tp_size=1, or train without adapters"
            )
        layer = super().from_native_module(module, *args, **kwargs)  # type: ignore[misc]
        if layer is not module:
            layer.__class__ = cls
        return layer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _OF_BALANCING}

    def assign(self, workload: Workload | None, migration: ColumnMigration | None = None) -> None:
        """Compute ``workload`` from the next training forward pass on; None means the full share of the work. With
        ``migration``, which all ranks of the group must be given at the same time, other ranks compute columns; the
        workload then prunes only columns that are not given away."""
        if (workload or migration) is not None and (obstacle := self.column_obstacle()) is not None:
            raise ValueError(f"{type(self).__name__} cannot be balanced with {obstacle}; turn one of them off")
        self.workload = workload
        self._migration = migration
        self._previous = {}
        self.begin_iteration()

    def begin_iteration(self) -> None:
        self._lineage = None

    def forget_gradients(self) -> None:
        """Impute zeros in the next backward passes, instead of gradients that were multiplied by another loss scale."""
        self._previous = {}

    def option_obstacle(self) -> str | None:
        """The option of this layer that no kind of balancing can be combined with, as ``name=value``, or None."""
        for option in ("use_zbv", "fp8_communication"):
            if getattr(self, option):
                return f"{option}=True"
        if getattr(self, "stream_chunk_num", 1) > 1:
            return f"stream_chunk_num={self.stream_chunk_num}"  # type: ignore[attr-defined]
        return None

    def column_obstacle(self) -> str | None:
        """The option because of which the layer's columns cannot be balanced, as ``name=value``, or None."""
        if self.sequence_parts is not None:
            return f"seq_parallel_mode={self.seq_parallel_mode!r}"  # type: ignore[attr-defined]
        return self.option_obstacle()

    def block_obstacle(self) -> str | None:
        """The option because of which the layer cannot be part of a block, as ``name=value``, or None."""
        for option, value in (("gather_output", True), ("skip_bias_add", True), ("parallel_input", False)):
            if getattr(self, option, not value) is value:
                return f"{option}={value}"
        return self.option_obstacle()

    @property
    def sequence_parts(self) -> SequenceParts | None:
        """Division of the sequence outside of the block; None: every rank has all of it."""
        if not is_share_sp_tp(self.seq_parallel_mode):  # type: ignore[attr-defined]
            return None
        # Conv1D layers always use dimension 1.
        return SequenceParts(self.process_group, getattr(self, "seq_parallel_dim", 1))  # type: ignore[attr-defined]

    @property
    def output_dim(self) -> int:
        return 1 - self._layout.columns

    @property
    def contraction_columns(self) -> int:
        """``L``, the number of columns of this rank's weight; a workload's pruning ratio is a share of them."""
        return self.weight.shape[self._layout.columns]  # type: ignore[attr-defined]

    @property
    def matrix(self) -> Tensor:
        return self._layout.as_matrix(values_of(self.weight))  # type: ignore[attr-defined]

    def _passes_through(self) -> bool:
        assigned = self.workload is not None or self._migration is not None
        in_block = self.block is not None and (self.block.workload or self.block.held) is not None
        if not (assigned or in_block or self.clock or self.slow_down):
            return True
        # Mode "ring" computes parts of the product while the sequence is gathered, so that their times are unknown.
        in_ring = self.seq_parallel_mode == "ring" and self.block is None  # type: ignore[attr-defined]
        return in_ring or self.option_obstacle() is not None

    def _check_autocast(self, x: Tensor) -> None:
        device = x.device.type
        if not (torch.is_autocast_enabled(device) and torch.is_grad_enabled()):
            return
        weight, kind = self.weight.dtype, torch.get_autocast_dtype(device)  # type: ignore[attr-defined]
        if not (x.dtype == weight == kind):
            raise RuntimeError(
                f"torch.autocast to {kind} around a tensor-parallel layer with weights of {weight} and an input of "
                f"{x.dtype}: Colossal-AI's layers have no backward pass for it. Leave autocast out, and give the "
                "plugin precision='bf16' or 'fp16'"
            )

    @torch.compiler.disable(recursive=False)
    def forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self._check_autocast(input_)
        if (self.block is None or self.block.before_forward is None) and self._passes_through():
            return super().forward(input_)  # type: ignore[misc]
        return self._balanced_forward(input_)

    @uncompiled
    @traced("layer")
    def _balanced_forward(self, input_: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        self._begin_block()
        if self._passes_through():
            return super().forward(input_)  # type: ignore[misc]
        return self._computed(input_)

    def _computed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """The layer's output by this package's products, as the parent's forward returns it."""
        raise NotImplementedError

    def _multiply(self, x: Tensor, bias: Tensor | None, group: dist.ProcessGroup | None) -> Tensor:
        layer: Any = self
        sequence = self.sequence_parts if self.column_parallel else None
        if layer.training:
            self.rows += x.numel() // x.shape[-1] * (1 if sequence is None else sequence.ranks)
            self.passes += 1
        migration = self._migration if self._migration is not None and self._is_balanced() else None
        lineage = self._columns_for(x)
        if migration is not None:
            context = MigratedProductContext(
                *(self._layout, group, lineage, None, self.clock, self.kind, self.slow_down),
                migration=migration,
                column_parallel=self.column_parallel,
            )
            return migrated_product(x, layer.weight, bias, context)
        block = self.block if self.block is not None and len(self.block.layers) > 1 else None
        how = ProductContext(
            self._layout,
            group,
            lineage,
            None if self.block is None else self.block.share_of(self),
            self.clock,
            self.kind,
            self.slow_down,
            before_forward="block" if block is not None and self is not block.layers[0] else "other",
            before_backward="block" if self.block is not None and self.column_parallel else "other",
            sequence=sequence,
            in_block=block is not None,
            inner_backward=block is not None and self not in block.layers[-2:],
        )
        return parallel_product(x, layer.weight, bias, how)

    def _begin_block(self) -> None:
        block = self.block
        is_first = block is not None and block.before_forward is not None and block.layers[0] is self
        if is_first and self._is_balanced():
            block.before_forward()

    def _is_balanced(self) -> bool:
        """True if the workload applies to the current forward pass: only if gradients will be computed for it."""
        return self.training and is_recorded()  # type: ignore[attr-defined]

    def _columns_for(self, x: Tensor) -> Lineage | None:
        if (workload := self.workload) is None or workload.prune == 0 or not self._is_balanced():
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
            self.clock.mark(part, self.kind)


class _HeteroColumnParallel(HeteroLinear):
    """Weight ``[N/e, K]``: X is replicated; forward sends nothing, backward sums dX over the group. With sequence
    parallelism, forward gathers X and each rank keeps its part of the sum."""

    column_parallel = True

    def _computed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self
        y = self._multiply(x, None if layer.skip_bias_add else layer.bias, layer.process_group)
        if layer.gather_output:
            if hasattr(layer, "split_sizes"):
                y = gather_forward_split_backward_fused_qkv(y, layer.split_sizes, layer.process_group)
            else:
                y = gather_forward_split_backward(y, dim=-1, process_group=layer.process_group)
            self._mark("communication")
        y = self._without_padding(y)
        return (y, layer.bias) if layer.skip_bias_add else y

    def _without_padding(self, y: Tensor) -> Tensor:
        return y


class _HeteroRowParallel(HeteroLinear):
    """Weight ``[N, K/e]``: forward sums Y over the group, backward sends nothing. With sequence parallelism, each rank
    keeps its part of the sum, and backward gathers dY."""

    column_parallel = False

    def _computed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        layer: Any = self
        if not layer.parallel_input and hasattr(layer, "split_sizes"):
            x = split_forward_gather_backward_fused_qkv(x, layer.split_sizes, layer.process_group)
        elif not layer.parallel_input:
            x = split_forward_gather_backward(x, dim=-1, process_group=layer.process_group)
        y = self._multiply(x, None, None)
        sequence = self.sequence_parts
        y = sum_outputs(y, layer.process_group) if sequence is None else sum_parts(y, sequence, self._mark)
        self._mark("communication")
        if layer.skip_bias_add:
            return y, layer.bias
        return y if layer.bias is None else y + layer.bias


class HeteroLinear1D_Col(_HeteroColumnParallel, Linear1D_Col):
    """Column-parallel ``torch.nn.Linear``; see Colossal-AI's ``Linear1D_Col`` for the arguments."""


class HeteroLinear1D_Row(_HeteroRowParallel, Linear1D_Row):
    """Row-parallel ``torch.nn.Linear``; see Colossal-AI's ``Linear1D_Row`` for the arguments."""


class HeteroVocabParallelLMHead1D(_HeteroColumnParallel, VocabParallelLMHead1D):
    """Head of a language model, weight ``[V/e, K]`` with the vocabulary padded to ``V``. Outputs have no padding:
    ``[.., vocabulary]`` if gathered, else ``[.., n]`` for the rows that this rank computes."""

    def _without_padding(self, y: Tensor) -> Tensor:
        if self.block is not None and self.block.share_of(self) is not None:
            # The loss knows which rows these are.
            return y
        return y[..., : self.old_num_embeddings if self.gather_output else self.num_valid_embeddings_local]


class HeteroFusedLinear1D_Col(_HeteroColumnParallel, FusedLinear1D_Col):
    """Column-parallel fused linear layer (q, k and v in one weight); see Colossal-AI's ``FusedLinear1D_Col``."""


class HeteroFusedLinear1D_Row(_HeteroRowParallel, FusedLinear1D_Row):
    """Row-parallel fused linear layer; see Colossal-AI's ``FusedLinear1D_Row``."""


class HeteroGPT2FusedLinearConv1D_Col(_HeteroColumnParallel, GPT2FusedLinearConv1D_Col):
    """Column-parallel ``Conv1D`` of GPT-2, weight ``[K, N/e]``; see Colossal-AI's ``GPT2FusedLinearConv1D_Col``."""

    _layout = CONV1D_LAYOUT


class HeteroGPT2FusedLinearConv1D_Row(_HeteroRowParallel, GPT2FusedLinearConv1D_Row):
    """Row-parallel ``Conv1D`` of GPT-2, weight ``[K/e, N]``; see Colossal-AI's ``GPT2FusedLinearConv1D_Row``."""

    _layout = CONV1D_LAYOUT


HETERO_LAYERS: dict[type, type[HeteroLinear]] = {
    kind.__bases__[1]: kind
    for kind in (
        *(HeteroLinear1D_Col, HeteroLinear1D_Row, HeteroFusedLinear1D_Col, HeteroFusedLinear1D_Row),
        *(HeteroGPT2FusedLinearConv1D_Col, HeteroGPT2FusedLinearConv1D_Row, HeteroVocabParallelLMHead1D),
    )
}
"""Layer of this package by Colossal-AI's exact class; other subclasses are not replaced."""


def hetero_layers(model: nn.Module) -> dict[str, HeteroLinear]:
    """The layers of ``model`` that accept a workload, by qualified name, in the order of the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HeteroLinear)}
