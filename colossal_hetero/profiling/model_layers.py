"""Find the blocks between which a pipeline cuts a model, and the size of each layer.

Colossal-AI's policies cut a model inside one row of modules of the same class, and ``num_layers_per_stage`` counts
these: ``blocks`` of timm's vision transformers, ``transformer.h`` of GPT-2, ``model.layers`` of Llama. Here the row is
found by its structure: the ``ModuleList`` or ``Sequential`` of modules of one class with most parameters. The *layers*
of a model are the part before the first block, each block, and the part after the last one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from ..layers.chain import Chain, links_of
from .training_step import with_dicts

RIVAL_SHARE = 0.25
"""Share of the largest row's parameters from which on a second row makes it unclear which one to cut."""


@dataclass(frozen=True, eq=False)
class BlockRow:
    name: str
    """Name of their module, e.g. "transformer.h"."""
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True, eq=False)
class LayerDescription:
    """Layers of a model; tuples are ``[blocks + 2]``, the part before the blocks first, and that after them last."""

    row: BlockRow
    parameters: tuple[int, ...]
    """Number of parameters of each layer. Tied embeddings count at both ends, because both stages hold them."""
    parameter_bytes: tuple[int, ...]
    flops: tuple[int, ...] | None
    """FLOP of the forward pass of each layer for the given batch (backward: about twice as many), if there is one."""
    before: tuple[str, ...]
    after: tuple[str, ...]


def find_block_row(model: nn.Module, name: str | None = None) -> BlockRow:
    """The row of blocks between which Colossal-AI's pipeline cuts ``model``."""
    kind = type(model).__name__
    if isinstance(model, Chain):
        return BlockRow("links", tuple(model.links))
    rows = {each: modules for each, modules in model.named_modules() if _is_row(modules)}
    if name is not None:
        if name not in rows:
            raise ValueError(f"{kind} has no row of blocks {name!r}; it has {', '.join(rows) or 'none'}")
        return BlockRow(name, tuple(rows[name].children()))
    # Skip rows inside blocks.
    outer = [each for each in rows if not any(each.startswith(f"{other}.") for other in rows)]
    sizes = {each: sum(parameter.numel() for parameter in rows[each].parameters()) for each in outer}
    if not sizes:
        raise ValueError(
            f"{kind} has no ModuleList or Sequential of modules of one class, so a pipeline cannot cut it by layers"
        )
    largest = max(sizes, key=sizes.__getitem__)
    rivals = [each for each in sizes if each != largest and sizes[each] >= RIVAL_SHARE * sizes[largest]]
    if rivals:
        raise ValueError(
            f"{kind} has more than one row of blocks: {', '.join([largest, *rivals])}; plan a model with one row, like "
            "timm's vision transformers, GPT-2, Llama or BERT, and train this one without a plan (give the plugin "
            "tp_size and pp_size); or, if Colossal-AI cuts only one of these rows, name the row in Python with blocks="
        )
    return BlockRow(largest, tuple(rows[largest].children()))


def count_blocks(model: nn.Module) -> int:
    """Blocks that plans divide: the links of a chain, or those of :func:`find_block_row`."""
    return len(links_of(model) or find_block_row(model).blocks)


def describe_layers(model: nn.Module, batch: Any = None, *, blocks: str | None = None) -> LayerDescription:
    row = find_block_row(model, blocks)
    ends, flops = (None, None) if batch is None else _trace(model, row, batch)
    owned: dict[str, list[str]] = {"before": [], "after": []}
    inside = {id(parameter) for block in row.blocks for parameter in block.parameters()}
    passed = False
    for module_name, module in model.named_modules(remove_duplicate=False):
        if module_name == row.name:
            passed = True
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if id(parameter) in inside:
                continue
            place = None if ends is None else ends.get(id(module))
            # Parameters of the model itself, such as a class token, are used before the blocks in all these models.
            by_order = "after" if passed and list(module.children()) == [] else "before"
            owned[place or by_order].append(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = [
        [parameters[name] for name in owned["before"]],
        *(list(block.parameters()) for block in row.blocks),
        [parameters[name] for name in owned["after"]],
    ]
    return LayerDescription(
        row=row,
        parameters=tuple(sum(each.numel() for each in group) for group in groups),
        parameter_bytes=tuple(sum(each.numel() * each.element_size() for each in group) for group in groups),
        flops=flops,
        before=tuple(owned["before"]),
        after=tuple(owned["after"]),
    )


def call_model(model: nn.Module, batch: Any) -> Any:
    """The outputs of ``model`` for a batch: a mapping, a pair (inputs, targets) or inputs."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0] if isinstance(batch, tuple | list) else batch)


def _is_row(module: nn.Module) -> bool:
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return False
    parts = list(module.children())
    return (
        len({type(part) for part in parts}) == 1
        and len(parts) == len(module)
        and all(any(True for _ in part.children()) and any(True for _ in part.parameters()) for part in parts)
        and not isinstance(parts[0], nn.ModuleList | nn.Sequential)
    )


def _trace(model: nn.Module, row: BlockRow, batch: Any) -> tuple[dict[int, str], tuple[int, ...]]:
    """Run ``model`` once: the part ("before" or "after" the blocks) of other modules by ``id``, and FLOP per layer."""
    # torch does not count the operations of fused attention on a CPU, so it is switched off.
    with _quiet_modes(model), sdpa_kernel(SDPBackend.MATH):
        try:
            with FakeTensorMode(allow_non_fake_inputs=True):
                return _trace_on(_with_fakes(model, batch), model, row, _ValuesAreTrue())
        except (RuntimeError, NotImplementedError, TypeError) as error:
            # Some models depend on values, which fake tensors do not have.
            if any(parameter.is_meta for parameter in model.parameters()):
                raise ValueError(
                    f"{type(model).__name__} does not run on tensors without values "
                    f"({' '.join(str(error).split())[:200]}); build it with weights to count its FLOP, or leave the "
                    "batch out"
                ) from None
        return _trace_on(lambda: call_model(model, batch), model, row, nullcontext())


class _ValuesAreTrue(TorchDispatchMode):
    """Answers True (or 1) if a model reads the value of a fake tensor: transformers test whether a mask is all True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


def _trace_on(
    run: Callable[[], Any], model: nn.Module, row: BlockRow, inner: AbstractContextManager[Any]
) -> tuple[dict[int, str], tuple[int, ...]]:
    places: dict[int, str] = {}
    done: list[int] = []
    """FLOP counted when each block begins, and when the last one ends."""
    left = False

    def enter(module: nn.Module, _: Any) -> None:
        done.append(counter.get_total_flops())

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        nonlocal left
        left = True
        done.append(counter.get_total_flops())

    def see(module: nn.Module, _: Any) -> None:
        places.setdefault(id(module), "after" if left else "before")

    within = {id(module) for block in row.blocks for module in block.modules()}
    hooks = [
        module.register_forward_pre_hook(see)
        for module in model.modules()
        if id(module) not in within and not list(module.children())
    ]
    hooks += [block.register_forward_pre_hook(enter) for block in row.blocks]
    hooks.append(row.blocks[-1].register_forward_hook(leave))
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter, inner:
            run()
    finally:
        for hook in hooks:
            hook.remove()
    if len(done) != len(row.blocks) + 1:
        raise ValueError(
            f"{type(model).__name__} does not run each module of {row.name} exactly once in order, so a pipeline "
            "cannot cut it by layers"
        )
    bounds = [0, *done, counter.get_total_flops()]
    return places, tuple(stop - start for start, stop in itertools.pairwise(bounds))


def _with_fakes(model: nn.Module, batch: Any) -> Callable[[], Any]:
    """A function that runs the model with fake tensors instead of its parameters, which stay as they are."""

    def fake(part: Any) -> Any:
        return torch.empty(part.shape, dtype=part.dtype) if isinstance(part, Tensor) else part

    tensors = {name: fake(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    inputs = tree_map(fake, with_dicts(batch))
    args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((_first(inputs),), {})
    return lambda: torch.func.functional_call(model, tensors, args, kwargs)


def _first(batch: Any) -> Any:
    return batch[0] if isinstance(batch, tuple | list) else batch


@contextmanager
def _quiet_modes(model: nn.Module) -> Iterator[None]:
    """In the block, use evaluation mode: passes change no buffer, draw no random number and accept a single sample."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
