"""Checkpoints of a plugin whose ZeRO stage is chosen late, and of sharded parameters on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from colossalai.booster.plugin import torch_fsdp_plugin
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPCheckpointIO
from colossalai.interface import OptimizerWrapper
from torch.distributed.fsdp import FullStateDictConfig, _optim_utils

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced
from ..checkpoint_part import PresentCheckpointIO
from .optimizer_checkpoints import load_optimizer


class StageCheckpointIO(PresentCheckpointIO):
    """The checkpoint IO of the present stage, which refuses an optimizer's checkpoint of other parameters."""

    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        load_optimizer(self._present(), optimizer, str(checkpoint), *args, **kwargs)


class ShardedCheckpointIO(TorchFSDPCheckpointIO):
    """FSDP's checkpoint IO. On a CPU it does not offload gathered parameters and states: that would free or overwrite
    the only copy."""

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with _without_offload():
            super().save_model(*args, **kwargs)

    def save_optimizer(self, *args: Any, **kwargs: Any) -> None:
        with _states_copied():
            super().save_optimizer(*args, **kwargs)


def _without_offload() -> AbstractContextManager[None]:
    if get_accelerator().name != "cpu":
        return nullcontext()

    def in_place(offload_to_cpu: bool = False, rank0_only: bool = False) -> FullStateDictConfig:
        return FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)

    return replaced(torch_fsdp_plugin, FullStateDictConfig=in_place)


def _states_copied() -> AbstractContextManager[None]:
    """In the block, FSDP copies the gathered states of parameters that it has kept. It gathers all in one buffer, and
    moves each to the CPU; on a CPU nothing moves, and all would be the one that was gathered last."""
    if get_accelerator().name != "cpu":
        return nullcontext()
    original = _optim_utils._unflatten_orig_param_states

    def copy(
        fsdp_param_info: Any, output_states: Any, state_name: str, shard_state: bool, to_save: bool, cpu_offload: bool
    ) -> None:
        original(fsdp_param_info, output_states, state_name, shard_state, to_save, cpu_offload=False)

    return replaced(_optim_utils, _unflatten_orig_param_states=copy)
