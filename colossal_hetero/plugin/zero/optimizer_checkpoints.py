"""Load an optimizer's checkpoint at another ZeRO stage than it was saved at; see [Note: names in checkpoints]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper
from colossalai.checkpoint_io import CheckpointIndexFile, CheckpointIO
from colossalai.checkpoint_io.utils import has_index_file, load_state_dict, load_state_dict_shards
from colossalai.interface import OptimizerWrapper
from colossalai.utils.safetensors import load_flat
from torch import nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._common_utils import _get_param_to_fqns, clean_tensor_name

from ...common.ranks import on_every_rank
from ...profiling.aborted_step import find_zero_optimizer
from ...profiling.preserved_state import inner_optimizer

# Parameter names -----------------------------------------------------------------------------------------------------
# [Note: names in checkpoints] A checkpoint of an optimizer refers to a parameter by its number: its place in the
# optimizer's groups. The stages number them differently: 1 and 2 leave out frozen parameters, and 3 with an
# ``auto_wrap_policy`` puts parameters outside of wrapped modules first. So every group holds the names of its
# parameters in this order, under ``param_names``, the entry that torch 2.6 uses for this; all stages save it.


NAMES = "param_names"  # entry of a group: names of its parameters, in the order in which a checkpoint numbers them


class ParameterFacts(NamedTuple):
    """A parameter as the user made it, before a stage's plugin casts or shards it."""

    name: str
    shape: tuple[int, ...]
    trained: bool  # it requires a gradient


def parameter_facts(model: nn.Module, optimizer: Any) -> dict[int, ParameterFacts]:
    """Parameters by ``id``, before they are configured; names of those only in the optimizer are their places there."""
    named = {value: plain_name(name) for name, value in model.named_parameters()}
    values = [value for group in inner_optimizer(optimizer).param_groups for value in group["params"]]
    other = {value: f"parameter {place}" for place, value in enumerate(values) if value not in named}
    return {
        id(value): ParameterFacts(name, tuple(value.shape), value.requires_grad)
        for value, name in (named | other).items()
    }


def check_owned(model: nn.Module, optimizer: Any, stages: Sequence[int]) -> None:
    """Check that the optimizer has all adapters of the model, and no parameters whose gradients would not be summed."""
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
    """Put the names of its parameters into every group of a configured optimizer; see [Note: names in checkpoints]."""
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


Group = Mapping[str, Any]
State = dict[str, Any]  # of one parameter: tensors with its whole shape, and numbers such as ``step``

PARAMETER_SHAPED = ("momentum_buffer", "exp_avg", "exp_avg_sq")  # entries with the parameter's shape


class Match(NamedTuple):
    names: dict[int, str]  # in the optimizer, of each numbered parameter of the checkpoint that it has
    options: list[dict[str, Any]]  # of each group of the optimizer, such as the learning rate, from the checkpoint


def match_groups(saved: Sequence[Group], groups: Sequence[Group], facts: Mapping[str, ParameterFacts]) -> Match:
    """Match the groups of a checkpoint with those of an optimizer by the names of their parameters. Without names (in
    one of Colossal-AI's own plugins), the order of parameters must be the same: it is at the same stage, or at another
    one without frozen parameters and without an ``auto_wrap_policy``."""
    if not all(len(group.get(NAMES, ())) == len(group["params"]) for group in saved):
        return _match_in_order(saved, groups)
    place = {
        name: (index, number)
        for index, group in enumerate(saved)
        for name, number in zip(group[NAMES], group["params"], strict=True)
    }
    trained = [name for group in groups for name in group[NAMES] if facts[name].trained]
    missing = [name for name in trained if name not in place]
    if missing:
        raise ValueError(
            f"the checkpoint has no parameter {_some(missing)}, which this optimizer trains; "
            "load a checkpoint of the same model and of the same parameters"
        )
    options: list[dict[str, Any]] = []
    sources: list[int] = []
    for index, group in enumerate(groups):
        found = sorted({place[name][0] for name in group[NAMES] if name in place})
        if len(found) > 1 or set(found) & set(sources):
            raise ValueError(
                f"the checkpoint has other groups of parameters: those of group {index} are in its "
                f"{'groups' if len(found) > 1 else 'group'} {', '.join(map(str, found))}, together with others; "
                "make the optimizer with the groups that it was saved with"
            )
        sources += found
        options.append(_options(saved[found[0]] if found else group))
    here = {name for group in groups for name in group[NAMES]}
    return Match({number: name for name, (_, number) in place.items() if name in here}, options)


def _match_in_order(saved: Sequence[Group], groups: Sequence[Group]) -> Match:
    counts = [[len(group[key]) for group in each] for each, key in ((saved, "params"), (groups, NAMES))]
    if counts[0] != counts[1]:
        raise ValueError(
            f"the checkpoint has {_sizes(counts[0])}, this optimizer {_sizes(counts[1])}, and the checkpoint does not "
            "contain the names of its parameters; load it at the stage that it was saved at, and save it again"
        )
    names = {
        number: name
        for one, other in zip(saved, groups, strict=True)
        for number, name in zip(one["params"], other[NAMES], strict=True)
    }
    return Match(names, [_options(group) for group in saved])


def _options(group: Group) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", NAMES)}


def _sizes(counts: Sequence[int]) -> str:
    return f"{len(counts)} groups of {', '.join(map(str, counts))} parameters"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def states_by_name(
    states: Iterable[tuple[int, State]], match: Match, facts: Mapping[str, ParameterFacts]
) -> dict[str, State]:
    found: dict[str, State] = {}
    for number, state in states:
        if not state:
            continue
        if number not in match.names:
            raise ValueError(
                f"the checkpoint has the state of parameter {number}, which this optimizer does not train; load a "
                "checkpoint of the same model and of the same parameters"
            )
        name = match.names[number]
        for key in PARAMETER_SHAPED:
            value = state.get(key)
            if isinstance(value, torch.Tensor) and tuple(value.shape) != facts[name].shape:
                raise ValueError(
                    f"{key} of parameter {number} in the checkpoint has shape {tuple(value.shape)}, but parameter "
                    f"{number} is {name} with shape {facts[name].shape}; load a checkpoint of the same model, or load "
                    "this one at the stage that it was saved at, and save it again"
                )
        found[name] = state
    return found


def load_optimizer(
    checkpoint_io: CheckpointIO,
    optimizer: OptimizerWrapper,
    facts: Mapping[str, ParameterFacts],
    checkpoint: str,
    prefix: str | None = None,
    low_cpu_mem_mode: bool = True,
    num_threads: int = 1,
) -> None:
    """Load a checkpoint that was saved at any stage. Every rank calls it."""
    groups = inner_optimizer(optimizer).param_groups
    shard = optimizer.unwrap_model().module if isinstance(optimizer, FSDPOptimizerWrapper) else None
    streamed = False
    states: dict[str, State] = {}
    options: list[dict[str, Any]] = []

    def read() -> None:
        nonlocal streamed, states, options
        saved, files = _read_groups(checkpoint)
        match = match_groups(saved, groups, facts)
        in_order = [(group["params"], group.get(NAMES)) for group in saved] == _numbered(groups)
        streamed = shard is None and in_order and isinstance(files, list)
        if not streamed:
            states, options = states_by_name(_read_states(files), match, facts), match.options

    on_every_rank(read, f"loading the optimizer's checkpoint {checkpoint}")
    if streamed:
        checkpoint_io.load_optimizer(optimizer, checkpoint, prefix, low_cpu_mem_mode, num_threads)
    elif shard is not None:
        _load_sharded(shard, optimizer, states, options)
    else:
        _load_by_number(optimizer, states, options)
    _separate_scalars(inner_optimizer(optimizer))


def _separate_scalars(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter tensors of its own for numbers such as ``step``. In a checkpoint of stage 3, the parameters
    of one flat parameter share one, which another stage would increase once for each parameter in every step."""
    seen: set[int] = set()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                state[key] = value.clone() if value.data_ptr() in seen else value
                seen.add(value.data_ptr())


def _numbered(groups: Sequence[Group]) -> list[tuple[list[int], list[str]]]:
    numbers = iter(range(sum(len(group[NAMES]) for group in groups)))
    return [([next(numbers) for _ in group[NAMES]], list(group[NAMES])) for group in groups]


def _read_groups(checkpoint: str) -> tuple[list[dict[str, Any]], list[str] | dict[int, State]]:
    """The groups in a checkpoint, and the files of the states, or the states if they are in the same file."""
    if not Path(checkpoint).exists():
        raise ValueError(f"{checkpoint}: no such file or folder")
    exists, index_path = has_index_file(checkpoint)
    if exists:
        index = CheckpointIndexFile.from_file(index_path)
        group_file = index.get_param_group_filename()
        if group_file is None:
            raise ValueError(f"{index_path} names no file of parameter groups; it is not a checkpoint of an optimizer")
        return load_state_dict(group_file), index.get_checkpoint_filenames()[0]
    if Path(checkpoint).is_dir():
        raise ValueError(f"{checkpoint} has no index file; it is not a checkpoint of an optimizer")
    content = load_flat(checkpoint) if str(checkpoint).endswith(".safetensors") else load_state_dict(checkpoint)
    if not isinstance(content, dict) or not {"state", "param_groups"} <= content.keys():
        raise ValueError(f"{checkpoint} is not a checkpoint of an optimizer")
    return content["param_groups"], content["state"]


def _read_states(files: list[str] | dict[int, State]) -> Iterator[tuple[int, State]]:
    for part in [files] if isinstance(files, dict) else load_state_dict_shards(files, True, False):
        yield from ((int(number), state) for number, state in part.items())


def _load_by_number(
    optimizer: OptimizerWrapper, states: Mapping[str, State], options: Sequence[Mapping[str, Any]]
) -> None:
    numbered = _numbered(inner_optimizer(optimizer).param_groups)
    groups = [
        {**chosen, NAMES: names, "params": numbers} for (numbers, names), chosen in zip(numbered, options, strict=True)
    ]
    places = {number: name for numbers, names in numbered for number, name in zip(numbers, names, strict=True)}
    found = {number: states[name] for number, name in places.items() if name in states}
    optimizer.load_state_dict({"state": found, "param_groups": groups})


def _load_sharded(
    shard: FullyShardedDataParallel,
    optimizer: OptimizerWrapper,
    states: dict[str, State],
    options: Sequence[Mapping[str, Any]],
) -> None:
    names_in_shard = _get_param_to_fqns(shard)
    for value, names in names_in_shard.items():
        if isinstance(value, FlatParameter):
            states |= _complete([plain_name(name) for name in names], value._shapes, states)
    full = {plain_name(name): name for names in names_in_shard.values() for name in names}
    groups = [
        {**chosen, NAMES: list(group[NAMES]), "params": [full[name] for name in group[NAMES]]}
        for group, chosen in zip(inner_optimizer(optimizer).param_groups, options, strict=True)
    ]
    content = {"state": {full[name]: state for name, state in states.items()}, "param_groups": groups}
    with FullyShardedDataParallel.state_dict_type(shard, StateDictType.FULL_STATE_DICT):
        part = FullyShardedDataParallel.optim_state_dict_to_load(model=shard, optim=optimizer, optim_state_dict=content)
    optimizer.load_state_dict(part)


def _complete(names: Sequence[str], shapes: Sequence[Sequence[int]], states: Mapping[str, State]) -> dict[str, State]:
    """States of zeros for parameters without a state whose neighbors in a flat parameter have one. FSDP keeps one state
    for all of them, and would drop it if the first parameter had none. A parameter without a state has not been
    trained, so that zeros have the same effect, except on the correction by ``step``."""
    known = next((states[name] for name in names if name in states), None)
    if known is None:
        return {}
    return {
        name: {
            key: value.new_zeros(tuple(shape)) if isinstance(value, torch.Tensor) and value.dim() > 0 else value
            for key, value in known.items()
        }
        for name, shape in zip(names, shapes, strict=True)
        if name not in states
    }
