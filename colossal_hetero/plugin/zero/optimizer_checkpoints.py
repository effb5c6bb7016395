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
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp._common_utils import _get_param_to_fqns

from ...processes.every_rank import on_every_rank
from ...profiling.preserved_state import inner_optimizer
from .parameter_names import NAMES, ParameterFacts, plain_name

__all__ = ["load_optimizer", "match_groups"]

Group = Mapping[str, Any]
State = dict[str, Any]
"""The state of one parameter: tensors with the whole parameter's shape, and numbers such as ``step``."""

PARAMETER_SHAPED = ("momentum_buffer", "exp_avg", "exp_avg_sq")
"""Entries of a state that have the shape of their parameter, in the optimizers of torch and Colossal-AI."""


class Match(NamedTuple):
    """How the groups of a checkpoint correspond to those of an optimizer."""

    names: dict[int, str]
    """Name, in the optimizer, of each numbered parameter of the checkpoint that the optimizer has."""
    options: list[dict[str, Any]]
    """The options of each group of the optimizer, such as the learning rate, from the checkpoint."""


def match_groups(saved: Sequence[Group], groups: Sequence[Group], facts: Mapping[str, ParameterFacts]) -> Match:
    """Match the groups of a checkpoint with those of an optimizer, by the names of their parameters.

    A checkpoint without names (of Colossal-AI's own plugins) is matched by the order of the parameters, which is the
    same if it was saved at the same stage, or at another one without frozen parameters and
    without an ``auto_wrap_policy``.

    Args:
        saved: groups of the checkpoint: ``params`` are numbers.
        groups: groups of the optimizer, with names.
        facts: the optimizer's parameters, by name.

    Raises:
        ValueError: parameters that are trained are missing in the checkpoint, or they are in other groups.
    """
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
    """The state of each parameter.

    Raises:
        ValueError: the optimizer does not have a parameter that has a state in the checkpoint, or the parameter has
            another shape.
    """
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
    """Load a checkpoint that was saved at any stage. Every rank calls it.

    Args:
        checkpoint_io: of the stage. It loads the checkpoint if the order of the parameters is that of the optimizer:
            it then holds only one file of a sharded checkpoint in memory at a time.
        optimizer: as the plugin of the stage has configured it.
        facts: the optimizer's parameters, by name.
        checkpoint, prefix, low_cpu_mem_mode, num_threads: see ``CheckpointIO.load_optimizer``.

    Raises:
        RuntimeError: on every rank, if the checkpoint cannot be read on a rank, or does not belong to this optimizer.
    """
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
    """Give every parameter tensors of its own for numbers such as ``step``.

    In a checkpoint of stage 3, parameters of one flat parameter share one such tensor. Loaded as it is at another
    stage, it would be increased once for each parameter in every step.
    """
    seen: set[int] = set()
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                state[key] = value.clone() if value.data_ptr() in seen else value
                seen.add(value.data_ptr())


def _numbered(groups: Sequence[Group]) -> list[tuple[list[int], list[str]]]:
    """Numbers and names of the parameters in each group of an optimizer, as torch saves them."""
    numbers = iter(range(sum(len(group[NAMES]) for group in groups)))
    return [([next(numbers) for _ in group[NAMES]], list(group[NAMES])) for group in groups]


def _read_groups(checkpoint: str) -> tuple[list[dict[str, Any]], list[str] | dict[int, State]]:
    """The groups in a checkpoint, and the files of the states, or the states if they are in the same file.

    Raises:
        ValueError: it is not a checkpoint of an optimizer.
    """
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
    """Load whole states at stages 0 to 2."""
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
    """Load whole states at stage 3."""
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
    """States of zeros for parameters without a state whose neighbors in a flat parameter have one.

    FSDP keeps one state for all of them; it would drop the states of all if the first parameter had none. A parameter
    without a state has not been trained yet: zeros have the same effect, except on the correction by ``step``.
    """
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
