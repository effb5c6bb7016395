"""Checkpoints of a plugin whose ZeRO stage is chosen late, and of sharded parameters on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from colossalai.booster.plugin import torch_fsdp_plugin
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPCheckpointIO
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from peft import PeftModel
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, StateDictType, _optim_utils

from ...colossalai_support.accelerator import get_accelerator
from ...colossalai_support.corrections import replaced
from ..checkpoint_part import PresentCheckpointIO
from .optimizer_checkpoints import Shapes, load_optimizer, plain_name


class StageCheckpointIO(PresentCheckpointIO):
    """The checkpoint IO of the present stage, which refuses an optimizer's checkpoint of other parameters."""

    def __init__(
        self,
        of_stage: Callable[[], CheckpointIO],
        shapes: WeakKeyDictionary[OptimizerWrapper, Shapes],
    ) -> None:
        super().__init__(of_stage)
        self._shapes = shapes

    def load_optimizer(self, optimizer: OptimizerWrapper, checkpoint: str, *args: Any, **kwargs: Any) -> None:
        if optimizer not in self._shapes:
            raise ValueError(
                "the optimizer to load into is not one that booster.boost returned; boost it first, then load"
            )
        load_optimizer(self._present(), optimizer, self._shapes[optimizer], str(checkpoint), *args, **kwargs)


class ShardedCheckpointIO(TorchFSDPCheckpointIO):
    """FSDP's checkpoint IO, with adapters (LoRA). On a CPU it does not offload gathered parameters and states: that
    would free or overwrite the only copy."""

    def save_unsharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _without_offload(), _names_without_adapters(model):
            super().save_unsharded_model(model, *args, **kwargs)

    def save_sharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _without_offload(), _names_without_adapters(model):
            super().save_sharded_model(model, *args, **kwargs)

    def save_unsharded_optimizer(self, optimizer: OptimizerWrapper, *args: Any, **kwargs: Any) -> None:
        with _states_copied():
            super().save_unsharded_optimizer(optimizer, *args, **kwargs)

    def save_sharded_optimizer(self, optimizer: OptimizerWrapper, *args: Any, **kwargs: Any) -> None:
        with _states_copied():
            super().save_sharded_optimizer(optimizer, *args, **kwargs)

    def load_unsharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _names_without_adapters(model):
            super().load_unsharded_model(model, *args, **kwargs)

    def load_sharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _names_without_adapters(model):
            super().load_sharded_model(model, *args, **kwargs)

    def save_lora_as_pretrained(
        self, model: ModelWrapper, checkpoint: str, use_safetensors: bool = False, state_dict: dict | None = None
    ) -> None:
        shard = model.unwrap()
        if not isinstance(shard.module, PeftModel):
            raise ValueError("the model has no adapters to save; call booster.enable_lora before booster.boost")
        if state_dict is None:
            config = FullStateDictConfig(offload_to_cpu=get_accelerator().name != "cpu", rank0_only=True)
            with FullyShardedDataParallel.state_dict_type(shard, StateDictType.FULL_STATE_DICT, config):
                state_dict = shard.state_dict()
        if self.coordinator.is_master():
            shard.module.save_pretrained(checkpoint, safe_serialization=use_safetensors, state_dict=state_dict)


@contextmanager
def _names_without_adapters(model: ModelWrapper) -> Iterator[None]:
    """In the block, a model with adapters saves and loads weights by their names without adapters, as stages 0 to 2 do:
    ``head.weight`` instead of ``base_model.model.head.base_layer.weight``."""
    shard = model.unwrap()
    if not isinstance(shard.module, PeftModel):
        yield
        return

    def short(name: str) -> str:
        return name.removeprefix("base_model.model.").replace(".base_layer.", ".")

    def shorten(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in list(state):
            state[short(name)] = state.pop(name)

    def lengthen(module: Any, state: dict[str, Any], *_: Any) -> None:
        parameters = shard.module.named_parameters(remove_duplicate=False)
        buffers = shard.module.named_buffers(remove_duplicate=False)
        for name in [plain_name(name) for name, _ in (*parameters, *buffers)]:
            if short(name) in state:
                state[name] = state.pop(short(name))

    saving = shard._register_state_dict_hook(shorten)
    loading = shard.register_load_state_dict_pre_hook(lengthen)
    shard._load_state_dict_pre_hooks.move_to_end(loading.id, last=False)  # FSDP's own hook expects its own names
    try:
        yield
    finally:
        saving.remove()
        loading.remove()


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
