"""The vocabulary-parallel head of a language model as a block, whose units are groups of rows of the vocabulary. A rank
that takes rows computes their logits and their part of the loss, so neither X nor logits are sent. This works in
training passes in which the model computes the loss from ``labels``. In other passes, and if logits are asked for
(:class:`OwnLogits`), a rank computes those of its own rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import loss as colossalai_loss
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves, tree_map_only

from ..colossalai_support.corrections import without_second_derivatives
from .block import Block
from .linear import HeteroVocabParallelLMHead1D
from .unit_layout import UnitPlace
from .workload import Clock, uncompiled


class OwnRows:
    """Logits of a rank's own rows: how they are computed, and the result once that has happened. A rank keeps the
    head's input and the weights of these rows. So while a plan lets it compute others, it can compute these when they
    are first used, without a message."""

    def __init__(self, product: Callable[..., Tensor], x: Tensor, parameters: Sequence[Tensor]) -> None:
        self._product = product
        self._x: Tensor | None = x
        self._parameters = parameters
        self._versions = _versions(parameters)
        self._values: Tensor | None = None

    @property
    def need_parameters(self) -> bool:
        """True if the logits have not been computed, and the parameters are still the right ones."""
        return self._values is None and self._versions == _versions(self._parameters)

    def use(self, copies: Sequence[Tensor]) -> None:
        """Compute the logits with these ``copies`` of the parameters, which are about to change."""
        self._parameters, self._versions = copies, _versions(copies)

    def values(self) -> Tensor:
        if self._values is None:
            if self._versions != _versions(self._parameters):
                raise RuntimeError(
                    "the logits of this training pass were first used after the head's weight was changed otherwise "
                    "than by the boosted optimizer. While a plan divides the vocabulary over the ranks, logits are "
                    "computed when they are used: use them before the change, or set BalanceConfig(head=False)"
                )
            with torch.no_grad():
                self._values = self._product(self._x, *self._parameters)
            self._x, self._parameters = None, ()
        return self._values


def _versions(parameters: Sequence[Tensor]) -> list[int]:
    return [parameter._version for parameter in parameters]


class OwnLogits(Tensor):
    """A tensor whose elements are computed when an operation first needs them."""

    rows: OwnRows

    @staticmethod
    def of(rows: OwnRows, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> OwnLogits:
        make: Any = Tensor
        made: OwnLogits = make._make_wrapper_subclass(OwnLogits, shape, dtype=dtype, device=device)
        made.rows = rows
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls.of(args[0].rows, args[0].shape, args[0].dtype, args[0].device)
        args, kwargs = tree_map_only(OwnLogits, lambda logits: logits.rows.values(), (args, dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _READ_GRADIENT or (func is torch.autograd.grad and _holds_logits(args[1:], kwargs)):
                raise RuntimeError(
                    "the gradient of the logits of a training pass is not available while a plan divides the "
                    "vocabulary over the ranks: the model's own loss does not use this tensor. Take the gradient by a "
                    "tensor computed from the logits, or set BalanceConfig(head=False)"
                )
            if func in _READ_MEMORY:
                values = args[0].rows.values()
                args = values.detach().requires_grad_(args[0].requires_grad), *args[1:]
            return func(*args, **(kwargs or {}))


def _holds_logits(args: Any, kwargs: Any) -> bool:
    inputs = (kwargs or {}).get("inputs", args[:1])
    return any(isinstance(each, OwnLogits) for each in tree_leaves(inputs))


_READ_GRADIENT = {Tensor.register_hook, Tensor.retain_grad, vars(torch._C.TensorBase)["grad"].__get__}
"""Methods by which a loop sees or changes the whole gradient of a tensor."""

_READ_MEMORY = {
    getattr(Tensor, name)
    for name in (
        *("numpy", "tolist", "data_ptr", "storage", "untyped_storage", "__array__", "__repr__", "__format__"),
        *("__reduce_ex__", "__deepcopy__", "__dlpack__", "share_memory_"),
    )
}
"""Methods that read a tensor's memory without an operation."""


# Vocabulary loss -----------------------------------------------------------------------------------------------------
# Cross entropy of logits that are divided over ranks in any way. For each token three numbers are reduced over the
# group: the largest logit, the sum of the exponentials, and the target's logit. Colossal-AI's ``cross_entropy_1d``
# sends the same messages for equal parts, so ranks that a plan leaves as they are can go on using it.


@dataclass(frozen=True)
class VocabularyRows:
    """Rows of the current pass's logits, int64 ``[n]``, each on one rank; those from ``vocabulary`` on are padding."""

    numbers: Tensor
    vocabulary: int

    @cached_property
    def are_padding(self) -> Tensor:
        return self.numbers >= self.vocabulary

    def columns_of(self, target: Tensor) -> Tensor:
        """Column of each target's logit, int64 ``[T]``, or -1 if another rank has it or it is ignored."""
        return self._columns[target.where(target >= 0, self.vocabulary)]

    @cached_property
    def _columns(self) -> Tensor:
        """Column of the logit of each row of the vocabulary, or -1; the last entry is for ignored targets."""
        columns = self.numbers.new_full((self.vocabulary + 1,), -1)
        # Padding goes to the last entry, because leaving it out would make the host wait for a GPU to count the rest.
        own = torch.arange(len(self.numbers), device=columns.device)
        columns.scatter_(0, self.numbers.clamp(max=self.vocabulary), own)
        columns[self.vocabulary :] = -1
        return columns


_colossalais: Callable[..., Tensor] = colossalai_loss.cross_entropy_1d
_expected: list[tuple[VocabularyRows | None, Clock | None]] = []


def expect_rows(rows: VocabularyRows | None, clock: Clock | None = None) -> None:
    """Let the next loss take its logits for ``rows`` (None: equal parts), and mark its collectives in ``clock``."""
    _expected[:] = [(rows, clock)]


def end_expecting() -> bool:
    """Expect equal parts again. Returns whether a loss was computed since :func:`expect_rows`."""
    was_computed = not _expected
    _expected.clear()
    return was_computed


@torch.compiler.disable
def cross_entropy_1d(
    vocab_logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    process_group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    mode: str = "mean",
) -> Tensor:
    """Replaces Colossal-AI's function of this name, with the same arguments."""
    rows, clock = _expected.pop() if _expected else (None, None)
    if rows is None:
        return _colossalais(vocab_logits, labels, ignore_index, process_group, vocab_size, dtype, mode)
    total = _CrossEntropy.apply(vocab_logits, labels, rows, ignore_index, process_group, clock)
    return total if mode == "sum" else total / (labels != ignore_index).sum()


@without_second_derivatives
class _CrossEntropy(torch.autograd.Function):
    """The sum over tokens of ``log Σ_v exp(logit_v) − logit_target``."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        rows: VocabularyRows,
        ignore_index: int,
        group: dist.ProcessGroup | None,
        clock: Clock | None,
    ) -> Tensor:
        def reduce(tensor: Tensor, operation: Any) -> Tensor:
            if clock is not None:
                clock.mark("other")
            dist.all_reduce(tensor, op=operation, group=group)
            if clock is not None:
                clock.mark("communication")
            return tensor

        assert logits.shape == (*target.shape, len(rows.numbers)), f"{logits.shape} logits of {target.shape} tokens"
        is_used = target != ignore_index
        shifted = logits.float().masked_fill(rows.are_padding, -torch.inf)
        shifted -= reduce(shifted.amax(-1).to(logits.dtype), dist.ReduceOp.MAX).unsqueeze(-1)
        columns = rows.columns_of(target)
        is_here = (columns >= 0) & is_used
        columns = columns.clamp_(min=0)
        of_target = shifted.gather(-1, columns.unsqueeze(-1)).squeeze(-1).where(is_here, 0.0)
        of_target = reduce(of_target.to(logits.dtype), dist.ReduceOp.SUM)
        probabilities = shifted.exp_()
        exponentials = reduce(probabilities.sum(-1), dist.ReduceOp.SUM)
        probabilities *= (is_used / exponentials).unsqueeze(-1)
        probabilities.scatter_add_(-1, columns.unsqueeze(-1), -is_here.to(probabilities.dtype).unsqueeze(-1))
        ctx.save_for_backward(probabilities.to(logits.dtype))
        return (exponentials.log() - of_target).where(is_used, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (of_logits,) = ctx.saved_tensors
        return of_logits * gradient.to(of_logits.dtype), None, None, None, None, None


MAX_UNITS = 64  # maximum number of units, a power of two; rows are mostly a multiple of 64
_COPIES = ("CloneBackward0", "ToCopyBackward0")  # the nodes of operations that change no value, except by rounding


class HeadBlock(Block):
    def __init__(self, name: str, head: HeteroVocabParallelLMHead1D, model: nn.Module) -> None:
        layer: Any = head
        rows = layer.weight.shape[0]
        units = gcd(rows, MAX_UNITS)
        place = UnitPlace(0, 1, units, rows // units)
        super().__init__(name, (), head, [[place] if layer.bias is None else [place, place]], None, ())
        self._head = layer
        self._rows: VocabularyRows | None = None
        self._computes_loss = False
        # Known with the first training loss: computed by Colossal-AI's function from the head's own outputs, or not.
        self.moves = None
        self.reshards = False  # in evaluation, loops use the logits of the rank's own rows
        self._outputs: Tensor | None = None  # outputs of the head in a pass that may decide whether units can migrate
        self._logits: OwnLogits | None = None
        self._type: torch.dtype | None = None
        self._unused: list[ReferenceType[OwnRows]] = []  # logits since the last step that may still be asked for
        colossalai_loss.cross_entropy_1d = cross_entropy_1d  # which knows the rows of :func:`expect_rows`
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end)
        layer.register_forward_hook(self._keep_outputs)

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
        """See ``Block.begin_iteration``; logits that may still be asked for need the weights as they were."""
        super().begin_iteration()
        unused = [rows for reference in self._unused if (rows := reference()) is not None and rows.need_parameters]
        if unused:
            copies = [tensor.clone() for tensor in self.parameters[0]]
            for rows in unused:
                rows.use(copies)
        self._unused = []

    def _is_active(self, layer: Any) -> bool:
        return self._computes_loss and super()._is_active(layer)

    def _numbers(self) -> Tensor:
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
        if self._computes_loss and self.moves is None and outputs.grad_fn is not None:
            self._outputs = outputs

    @uncompiled
    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        outputs, self._outputs = self._outputs, None
        has_loss = end_expecting()
        if outputs is not None and model.training:
            logits = output.get("logits") if isinstance(output, Mapping) else None
            self.moves = has_loss and (logits is None or _is_copy(logits, outputs))
            self._type = None if logits is None else logits.dtype
        if not self._is_active(self._head):
            return
        if not has_loss or self.moves is False:
            raise RuntimeError(
                f"{type(model).__name__} computes its loss otherwise than by Colossal-AI's cross_entropy_1d, or "
                "changes the outputs of its head, so rows of the head cannot migrate; exclude it with "
                "BalanceConfig(head=False)"
            )
        if "logits" in output:
            output["logits"] = self._logits
        self._logits = None


def _is_copy(tensor: Tensor, of: Tensor) -> bool:
    """True if one tensor, with gradients, has the values of another one, perhaps in another type."""
    node = tensor.grad_fn
    while node is not of.grad_fn and type(node).__name__ in _COPIES:
        node = node.next_functions[0][0]  # type: ignore[union-attr]
    return node is of.grad_fn


def attach_head_blocks(model: nn.Module) -> list[Block]:
    """Connect heads of ``model`` that feed a vocabulary-parallel loss to blocks; call it once per model."""
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
