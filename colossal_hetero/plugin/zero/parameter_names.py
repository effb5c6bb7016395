"""Names and shapes of the parameters in an optimizer, which make its checkpoints independent of the ZeRO stage.

[Note: names in checkpoints] A checkpoint of an optimizer refers to a parameter by its number: its place in the
optimizer's groups. The stages number them differently: stages 1 and 2 leave out frozen parameters, and stage 3 with an
``auto_wrap_policy`` puts the parameters that are not in a wrapped module first. So every group holds the names of its
parameters in the order of the checkpoint, under ``param_names``, the entry that torch 2.6 uses for the same purpose.
All stages save the entries of groups, so that a checkpoint of any stage tells which parameter has which number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper
from colossalai.interface import OptimizerWrapper
from torch import nn
from torch.distributed.fsdp import FlatParameter
from torch.distributed.fsdp._common_utils import _get_param_to_fqns, clean_tensor_name

from ...profiling.aborted_step import find_zero_optimizer
from ...profiling.preserved_state import inner_optimizer

__all__ = ["NAMES", "ParameterFacts", "check_owned", "name_groups", "parameter_facts", "plain_name"]

NAMES = "param_names"
"""Entry of an optimizer's group: names of its parameters, in the order in which a checkpoint numbers them."""


class ParameterFacts(NamedTuple):
    """A parameter as the user made it, before a stage's plugin casts or shards it."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    """Whether it requires a gradient."""


def parameter_facts(model: nn.Module, optimizer: Any) -> dict[int, ParameterFacts]:
    """The parameters of ``model`` and of ``optimizer``, by ``id``; both are not configured yet.

    A parameter that only the optimizer has, such as one of the criterion, is named by its place in the optimizer.
    """
    named = {value: plain_name(name) for name, value in model.named_parameters()}
    values = [value for group in inner_optimizer(optimizer).param_groups for value in group["params"]]
    other = {value: f"parameter {place}" for place, value in enumerate(values) if value not in named}
    return {
        id(value): ParameterFacts(name, tuple(value.shape), value.requires_grad)
        for value, name in (named | other).items()
    }


def check_owned(model: nn.Module, optimizer: Any, stages: Sequence[int]) -> None:
    """Check that the optimizer has all adapters of the model, and no parameters whose gradients would not be summed.

    Raises:
        ValueError: the optimizer lacks adapters (LoRA) of the model, which would not be trained; or stage 0 or 3 is
            among ``stages``, which sum the gradients of the model's parameters only, and the optimizer has others, such
            as those of a criterion.
    """
    ours = set(model.parameters())
    values = [value for group in inner_optimizer(optimizer).param_groups for value in group["params"]]
    trained = set(values)
    left_out = [
        name
        for name, value in model.named_parameters()
        if "lora_" in name and value.requires_grad and value not in trained
    ]
    if left_out:
        raise ValueError(
            f"{len(left_out)} parameters of adapters, such as {left_out[0]}, are not in the optimizer, so they would "
            "not be trained; make the optimizer from the model that booster.enable_lora returns"
        )
    others = sum(value not in ours for value in values)
    if others and not {0, 3}.isdisjoint(stages):
        raise ValueError(
            f"{others} of {len(values)} parameters of the optimizer are not in the model, so that stages 0 and 3 would "
            "not sum their gradients over the ranks; make them part of the model (for example, a module with the model "
            "and the criterion), or use stage 1 or 2"
        )


def plain_name(name: str) -> str:
    """The name of a parameter without the parts that FSDP, activation checkpointing and ``torch.compile`` insert."""
    return clean_tensor_name(name).replace("_orig_mod.", "")


def name_groups(optimizer: OptimizerWrapper, facts: Mapping[int, ParameterFacts]) -> None:
    """Put the names of its parameters into every group of a configured optimizer; see [Note: names in checkpoints].

    Args:
        optimizer: as the plugin of a stage has configured it.
        facts: what :func:`parameter_facts` returned before.
    """
    zero = find_zero_optimizer(optimizer)
    is_sharded = isinstance(optimizer, FSDPOptimizerWrapper)
    flat = _get_param_to_fqns(optimizer.unwrap_model().module) if is_sharded else {}

    def names(value: Any) -> Iterator[str]:
        if isinstance(value, FlatParameter):
            yield from map(plain_name, flat[value])
        else:
            yield facts[id(value if zero is None else zero.master_to_working_param[id(value)])].name

    for group in inner_optimizer(optimizer).param_groups:
        group[NAMES] = [name for value in group["params"] for name in names(value)]
