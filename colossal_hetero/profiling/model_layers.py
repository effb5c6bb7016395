"""Find the blocks between which a pipeline cuts a model, and the size of each layer.

Colossal-AI's policies cut a model inside one row of modules of the same class, such as ``transformer.h`` of GPT-2. Here
the row is found by its structure: the ``ModuleList`` or ``Sequential`` of modules of one class with most parameters.
The *layers* of a model are the part before the first block, each block, and the part after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..layers.chain import Chain, links_of

RIVAL_SHARE = 0.25  # share of the largest row's parameters from which on a second row makes it unclear which one to cut


@dataclass(frozen=True, eq=False)
class BlockRow:
    name: str
    blocks: tuple[nn.Module, ...]


@dataclass(frozen=True, eq=False)
class LayerDescription:
    """Layers of a model; tuples are ``[blocks + 2]``, the part before the blocks first, and that after them last."""

    row: BlockRow
    parameter_bytes: tuple[int, ...]
    """Bytes of each layer. Tied embeddings count at both ends, because both stages hold them."""
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


def describe_layers(model: nn.Module, batch: Any, *, blocks: str | None = None) -> LayerDescription:
    """The layers of ``model``, which runs once with ``batch``."""
    row = find_block_row(model, blocks)
    places = _places(model, row, batch)
    owned: dict[str, list[str]] = {"before": [], "after": []}
    inside = {id(parameter) for block in row.blocks for parameter in block.parameters()}
    passed = False
    for module_name, module in model.named_modules(remove_duplicate=False):
        passed |= module_name == row.name
        # Parameters of the model itself, such as a class token, are used before the blocks in all these models.
        by_order = "after" if passed and not list(module.children()) else "before"
        for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
            if id(parameter) not in inside:
                owned[places.get(id(module), by_order)].append(name)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    groups = [
        [parameters[name] for name in owned["before"]],
        *(list(block.parameters()) for block in row.blocks),
        [parameters[name] for name in owned["after"]],
    ]
    return LayerDescription(
        row=row,
        parameter_bytes=tuple(sum(each.numel() * each.element_size() for each in group) for group in groups),
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


def _places(model: nn.Module, row: BlockRow, batch: Any) -> dict[int, str]:
    """Run ``model`` once: "before" or "after" the blocks, by ``id`` of the other modules without children."""
    places: dict[int, str] = {}
    ran: list[nn.Module] = []

    def enter(block: nn.Module, _: Any) -> None:
        ran.append(block)

    def see(module: nn.Module, _: Any) -> None:
        places.setdefault(id(module), "after" if len(ran) >= len(row.blocks) else "before")

    within = {id(module) for block in row.blocks for module in block.modules()}
    leaves = [each for each in model.modules() if id(each) not in within and not list(each.children())]
    hooks = [module.register_forward_pre_hook(see) for module in leaves]
    hooks += [block.register_forward_pre_hook(enter) for block in row.blocks]
    # In evaluation mode a pass changes no buffer, draws no random number and accepts a single sample.
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            call_model(model, batch)
    finally:
        for module, training in modes.items():
            module.training = training
        for hook in hooks:
            hook.remove()
    if [id(each) for each in ran] != [id(each) for each in row.blocks]:
        raise ValueError(
            f"{type(model).__name__} does not run each module of {row.name} exactly once in order, so a pipeline "
            "cannot cut it by layers"
        )
    return places
