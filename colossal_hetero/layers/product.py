"""The product of a tensor-parallel linear layer, dense or resized, forward and backward (docs/algorithms.md, 1.1).

If nothing is pruned, the result is bit for bit that of Colossal-AI's layers. With units of a block, the same formulas
apply to the units that this rank computes (:mod:`.unit_layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..colossalai_support.corrections import without_second_derivatives
from .unit_layout import UnitShare, WeightLayout
from .workload import Clock, Lineage, Part, Slowdown, matrix_view

# Outside of blocks each of ``e`` ranks holds a part of the sequence of ``S`` positions (Colossal-AI's modes
# ``split_gather`` and ``ring``). A column-parallel layer gathers X forward, and of dX, summed over ranks, each rank
# keeps its part; a row-parallel layer sums Y and gathers dY. ``ring`` overlaps gathering with the product; here that
# comes after.


class SequenceParts(NamedTuple):
    """A sequence that is divided evenly over the ranks of ``group``, along the dimension ``dim`` of each tensor."""

    group: dist.ProcessGroup
    dim: int

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    def gather(self, part: Tensor) -> Tensor:
        """The whole sequence ``[.., S, ..]``, from the ``part`` ``[.., S/e, ..]`` of each rank."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return torch.cat(parts, self.dim)

    def start_sum(self, whole: Tensor) -> tuple[Tensor, Any]:
        """Start summing ``whole [.., S, ..]`` over ranks. Returns this rank's part ``[.., S/e, ..]`` and a handle."""
        length, ranks = whole.shape[self.dim], self.ranks
        if length % ranks != 0:
            raise ValueError(
                f"a sequence of {length} positions cannot be divided over {ranks} ranks; with sequence parallelism, "
                f"pad it to a multiple of {ranks}"
            )
        parts = whole.unflatten(self.dim, (ranks, -1)).movedim(self.dim, 0).contiguous()
        own = torch.empty_like(parts[0])
        # The result has one dimension, because Gloo's operation compares numbers of elements along the first one.
        work = dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=self.group, async_op=True)
        return own, work


@without_second_derivatives
class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sequence: SequenceParts, mark: Callable[[Part], None]) -> Tensor:
        ctx.sequence, ctx.mark = sequence, mark
        own, work = sequence.start_sum(whole)
        work.wait()
        return own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        ctx.mark("other")
        whole = ctx.sequence.gather(gradient)
        ctx.mark("communication")
        return whole, None, None


sum_parts: Callable[[Tensor, SequenceParts, Callable[[Part], None]], Tensor] = _SumParts.apply
"""Sum of a whole over ranks, of which each keeps its part ``[.., S/e, ..]``; backward marks its gathering."""


@dataclass(slots=True)
class ProductContext:
    """Settings of a product, besides its operands."""

    layout: WeightLayout
    group: dist.ProcessGroup | None = None  # the group to sum dX over (column-parallel), or None
    lineage: Lineage | None = None
    share: UnitShare | None = None  # the units of a block to compute, or None for exactly this rank's own
    clock: Clock | None = None
    kind: int | None = None
    slow_down: Slowdown | None = None
    before_forward: Part = "other"  # part that the time since the last mark belongs to, when the forward product begins
    before_backward: Part = "other"
    sequence: SequenceParts | None = None
    """Division of X and dX over ``group`` (column-parallel, with sequence parallelism), or None."""
    in_block: bool = False
    """True if other layers of a block follow in the forward pass (column-parallel) or backward pass (row-parallel)."""
    inner_backward: bool = False
    """True if the backward products follow those of another column-parallel layer of the same block."""

    def mark(self, part: Part, inner: bool = False) -> None:
        if self.clock is not None:
            self.clock.mark(part, self.kind, inner)


@without_second_derivatives
class _ParallelProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: ProductContext
    ) -> Tensor | tuple[Tensor, Tensor]:
        how.mark(how.before_forward, how.before_forward == "block")
        if how.sequence is not None:
            x = how.sequence.gather(x)
            how.mark("communication")
        ctx.how = how
        ctx.columns = x.shape[-1]
        ctx.use_bias = bias is not None
        used_weight, share = weight, how.share
        if how.lineage is not None:
            x = x.index_select(-1, how.lineage.kept)
            used_weight = weight.index_select(how.layout.columns, how.lineage.kept)
        # Save the kept part of X, whose memory can then be released; the weight's part is cheap to select again.
        ctx.save_for_backward(x, weight, *(() if share is None else share.weights))
        if share is None:
            y = run(lambda: how.layout.output(x, used_weight, bias), how.slow_down)
        else:
            y = run(lambda: share.output(how.layout, x, weight, bias), how.slow_down)
        how.mark("matmul", how.in_block and how.group is not None and how.sequence is None)
        if share is None or share.own_outputs is None:
            return y
        ctx.set_materialize_grads(False)
        ctx.shape = y.shape
        return y, share.own_outputs(x)

    @staticmethod
    def backward(  # type: ignore[override]  # noqa: C901 - in the order of the passes; calls would take time
        ctx: Any, dy_or_none: Tensor | None, dy_own: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        how: ProductContext = ctx.how
        layout, lineage, share = how.layout, how.lineage, how.share
        how.mark(how.before_backward, how.inner_backward)
        x, weight, *others = ctx.saved_tensors
        if share is not None:
            share = share.with_weights(others)
        dy = x.new_zeros(ctx.shape) if dy_or_none is None else dy_or_none
        if lineage is not None:
            weight = weight.index_select(layout.columns, lineage.kept)

        if share is None:
            dx = run(lambda: layout.input_gradient(dy, weight), how.slow_down)
        else:
            dx = run(lambda: share.input_gradient(layout, dy, weight), how.slow_down)
        if dy_own is not None:
            # Rows of padding have no output.
            dy_own = F.pad(dy_own, (0, len(weight) - dy_own.shape[-1])).to(dx.dtype)
            dx += layout.input_gradient(dy_own, weight)
        if lineage is not None:
            backward_pass = lineage.begin_backward()
            dx = lineage.restore("input", backward_pass, dx, -1, ctx.columns)
        handle = None
        if how.sequence is not None or how.group is not None:
            how.mark("matmul")
        # CUDA_DEVICE_MAX_CONNECTIONS=1, which Colossal-AI sets, lets the collective start before the next product.
        if how.sequence is not None:
            dx, handle = how.sequence.start_sum(dx)
        elif how.group is not None:
            handle = dist.all_reduce(dx, group=how.group, async_op=True)

        dy_matrix = matrix_view(dy.contiguous())
        # Of a block, another layer's products follow; beside a collective only this product and the bias.
        inner = how.in_block if handle is None else share is None
        dw = None
        # A unit's weights and biases are sent together.
        if ctx.needs_input_grad[1] or (share is not None and ctx.needs_input_grad[2]):
            x_matrix = matrix_view(x.contiguous())
            # A part of a larger weight has no gradient of its own.
            dw = _weight_gradient(how, share, dy_matrix, x_matrix, weight.grad if weight.is_leaf else None)
            if lineage is not None:
                assert dw is not None
                dw = lineage.restore("weight", backward_pass, dw, layout.columns, ctx.columns)
            how.mark("matmul" if handle is None else "overlapped", inner)
        elif handle is None:
            how.mark("matmul", inner)
        db = None
        if ctx.use_bias:
            db = dy_matrix.sum(dim=0)
            how.mark("other", inner and handle is not None)
        if share is not None and dw is not None:
            dw, db = share.gradients(dw, db)
            how.mark("block")
        if dy_own is not None:
            rows = matrix_view(dy_own)
            dw = None if dw is None else dw.add_(layout.weight_gradient(rows, matrix_view(x)))
            db = None if db is None else db.add_(rows.sum(dim=0))
        if handle is not None:
            handle.wait()
            how.mark("communication")
        return dx, dw, db, None


def _weight_gradient(
    how: ProductContext, share: UnitShare | None, dy: Tensor, x: Tensor, grad: Tensor | None
) -> Tensor | None:
    """dW of what this rank computes; None if it was added to the weight's ``grad``."""
    if share is not None:
        return run(lambda: share.weight_gradient(how.layout, dy, x), how.slow_down)
    is_plain = how.lineage is None and how.slow_down is None
    if is_plain and grad is not None and how.layout.add_weight_gradient(dy, x, grad):
        return None
    return run(lambda: how.layout.weight_gradient(dy, x), how.slow_down)


def run(product: Callable[[], Tensor], slow_down: Slowdown | None) -> Tensor:
    return product() if slow_down is None else slow_down(product)


def parallel_product(x: Tensor, weight: Tensor, bias: Tensor | None, how: ProductContext) -> Tensor:
    """``Y [..., N] = X [..., L] · Wᵀ + b`` of one rank; the formulas are in the module's docstring."""
    outputs = _ParallelProduct.apply(x, weight, bias, how)
    return outputs if isinstance(outputs, Tensor) else outputs[0]


@without_second_derivatives
class _SumOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dy, None


sum_outputs: Callable[[Tensor, dist.ProcessGroup | None], Tensor] = _SumOutputs.apply
"""The sum of an output of a row-parallel layer over the ranks of a group, in place. The gradient is the same."""
