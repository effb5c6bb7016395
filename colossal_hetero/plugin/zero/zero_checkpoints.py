"""Checkpoints of a plugin whose ZeRO stage is chosen late. That of an optimizer is loaded with the parameters, in the
order, that it was saved with."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from colossalai.booster.plugin import torch_fsdp_plugin
from colossalai.booster.plugin.torch_fsdp_plugin import FSDPOptimizerWrapper, TorchFSDPCheckpointIO
from colossalai.checkpoint_io import CheckpointIndexFile
from colossalai.checkpoint_io.utils import has_index_file, load_state_dict, load_state_dict_shards
from colossalai.interface import OptimizerWrapper
from colossalai.utils.safetensors import load_flat
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, _optim_utils
from torch.distributed.fsdp._common_utils import _get_param_to_fqns, clean_tensor_name

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced
from ...common.ranks import on_every_rank
from ...profiling.aborted_step import find_zero_optimizer
from ...profiling.preserved_state import inner_optimizer
from ..checkpoint_part import PresentCheckpointIO

# [Note: names in checkpoints] A checkpoint of an optimizer refers to a parameter by its number: its place in the
# optimizer's groups. The stages number them differently. So every group holds the names of its parameters in this
# order, under ``param_names``, the entry that torch 2.6 uses for this, and its stage.
NAMES, STAGE = "param_names", "zero_stage"


def parameter_names(model: nn.Module, optimizer: Any) -> dict[int, str]:
    """Names by ``id``, before parameters are configured; of those only in the optimizer their places there."""
    values = [value for group in inner_optimizer(optimizer).param_groups for value in group["params"]]
    others = {id(value): f"parameter {place}" for place, value in enumerate(values)}
    return others | {id(value): plain_name(name) for name, value in model.named_parameters()}


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


def name_groups(optimizer: OptimizerWrapper, known: Mapping[int, str], stage: int) -> None:
    """Note names and stage in every group of a configured optimizer; see [Note: names in checkpoints]."""
    zero = find_zero_optimizer(optimizer)
    working = {} if zero is None else zero.master_to_working_param
    for group in inner_optimizer(optimizer).param_groups:
        group[NAMES] = [known[id(working.get(id(value), value))] for value in group["params"]]
        group[STAGE] = stage


Group = Mapping[str, Any]
State = dict[str, Any]  # of one parameter: tensors with its whole shape, and numbers such as ``step``


def check_groups(saved: Sequence[Group], groups: Sequence[Group]) -> None:
    """Check that an optimizer has the same parameters as a checkpoint, in the same groups and order; at stage 3, which
    loads by names, in any order."""
    stage = groups[0][STAGE]
    if not all(NAMES in group for group in saved):
        raise ValueError(
            "the checkpoint does not contain the names of its parameters, so their order may be another one: it was "
            "not saved by this plugin, which begins with a new optimizer there"
        )
    if (saved[0][STAGE] == 3) != (stage == 3) or _listed(saved, stage) != _listed(groups, stage):
        raise ValueError(
            f"the checkpoint was saved at ZeRO stage {saved[0][STAGE]} with {_in_words(saved)}, and this optimizer, "
            f"at stage {stage} with {_in_words(groups)}, has other ones, or in another order; use "
            f"stage={saved[0][STAGE]}, the model and the groups that it was saved with. To change between stages 0 to "
            "2, save and resume layer checkpoints: checkpoints=CheckpointConfig(...), plugin.save and plugin.resume"
        )


def _listed(groups: Sequence[Group], stage: int) -> list[list[str]]:
    return [sorted(group[NAMES]) if stage == 3 else group[NAMES] for group in groups]


def _in_words(groups: Sequence[Group]) -> str:
    return f"{len(groups)} groups of {', '.join(str(len(group[NAMES])) for group in groups)} parameters"


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


def _load_sharded(
    shard: FullyShardedDataParallel, optimizer: OptimizerWrapper, states: dict[str, State], saved: Sequence[Group]
) -> None:
    full = {plain_name(name): name for names in _get_param_to_fqns(shard).values() for name in names}
    groups = [
        {**chosen, NAMES: list(group[NAMES]), "params": [full[name] for name in group[NAMES]]}
        for group, chosen in zip(inner_optimizer(optimizer).param_groups, saved, strict=True)
    ]
    content = {"state": {full[name]: state for name, state in states.items()}, "param_groups": groups}
    with FullyShardedDataParallel.state_dict_type(shard, StateDictType.FULL_STATE_DICT):
        part = FullyShardedDataParallel.optim_state_dict_to_load(model=shard, optim=optimizer, optim_state_dict=content)
    optimizer.load_state_dict(part)


class StageCheckpointIO(PresentCheckpointIO):
    """The checkpoint IO of the present stage, which refuses an optimizer's checkpoint of other parameters."""

    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str | Path, *args: Any, **kwargs: Any) -> None:
        """Load a checkpoint; every rank calls it. Stages 0 to 2 read each other's, if they number parameters alike."""
        groups = inner_optimizer(optimizer).param_groups
        if STAGE not in groups[0]:
            raise ValueError(
                "the optimizer to load into is not one that booster.boost returned; boost it first, then load"
            )
        shard = optimizer.unwrap_model().module if isinstance(optimizer, FSDPOptimizerWrapper) else None
        stage = groups[0][STAGE]
        content: dict[str, Any] = {}

        def read() -> None:
            saved, files = _read_groups(str(checkpoint))
            check_groups(saved, groups)
            if shard is not None:
                names = {number: name for one in saved for number, name in zip(one["params"], one[NAMES], strict=True)}
                states = {names[number]: state for number, state in _read_states(files) if state}
                content.update(groups=saved, states=states)

        on_every_rank(read, f"loading the optimizer's checkpoint {checkpoint}")
        if shard is None:
            self._present().load_optimizer(optimizer, str(checkpoint), *args, **kwargs)
        else:
            _load_sharded(shard, optimizer, content["states"], content["groups"])
        for group in groups:
            group[STAGE] = stage


class ShardedCheckpointIO(TorchFSDPCheckpointIO):
    """FSDP's checkpoint IO. On a CPU it does not offload gathered parameters and states: that would free the only copy
    of parameters, and states, which FSDP gathers one by one in the same buffer, would all be the last one."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        def in_place(offload_to_cpu: bool = False, rank0_only: bool = False) -> FullStateDictConfig:
            return FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)

        with _on_cpu(torch_fsdp_plugin, FullStateDictConfig=in_place):
            super().save_model(*args, **kwargs)

    def save_optimizer(self, *args: Any, **kwargs: Any) -> None:
        original = _optim_utils._unflatten_orig_param_states

        def copy(*args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(original).bind(*args, **kwargs)
            original(**{**bound.arguments, "cpu_offload": False})

        with _on_cpu(_optim_utils, _unflatten_orig_param_states=copy):
            super().save_optimizer(*args, **kwargs)


def _on_cpu(module: Any, **values: Any) -> AbstractContextManager[None]:
    return replaced(module, **values) if get_accelerator().name == "cpu" else nullcontext()
