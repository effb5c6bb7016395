"""Checkpoints of a plugin whose ZeRO stage is chosen late, and of sharded parameters on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from colossalai.booster.plugin import torch_fsdp_plugin
from colossalai.booster.plugin.torch_fsdp_plugin import TorchFSDPCheckpointIO
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper
from torch.distributed.fsdp import FullStateDictConfig

from ...accelerator import get_accelerator

__all__ = ["ShardedCheckpointIO", "StageCheckpointIO"]


def _of_stage(name: str) -> Callable[..., Any]:
    def method(self: StageCheckpointIO, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._of_stage(), name)(*args, **kwargs)

    method.__name__ = name
    return method


class StageCheckpointIO(CheckpointIO):
    """Forwards each call to the checkpoint IO of the present stage.

    ``Booster`` gets the checkpoint IO in its constructor, but ``stage="auto"`` is decided later, in ``boost``.

    Args:
        of_stage: returns the checkpoint IO of the present stage. It must be the same object as long as the stage does
            not change, because it keeps what is being written in the background.
    """

    def __init__(self, of_stage: Callable[[], CheckpointIO]) -> None:
        super().__init__()
        self._of_stage = of_stage

    load_model = _of_stage("load_model")
    save_model = _of_stage("save_model")
    load_optimizer = _of_stage("load_optimizer")
    save_optimizer = _of_stage("save_optimizer")
    load_lr_scheduler = _of_stage("load_lr_scheduler")
    save_lr_scheduler = _of_stage("save_lr_scheduler")
    save_lora_as_pretrained = _of_stage("save_lora_as_pretrained")
    synchronize = _of_stage("synchronize")
    load_sharded_model = _of_stage("load_sharded_model")
    load_unsharded_model = _of_stage("load_unsharded_model")
    save_sharded_model = _of_stage("save_sharded_model")
    save_unsharded_model = _of_stage("save_unsharded_model")
    load_sharded_optimizer = _of_stage("load_sharded_optimizer")
    load_unsharded_optimizer = _of_stage("load_unsharded_optimizer")
    save_sharded_optimizer = _of_stage("save_sharded_optimizer")
    save_unsharded_optimizer = _of_stage("save_unsharded_optimizer")


class ShardedCheckpointIO(TorchFSDPCheckpointIO):
    """FSDP's checkpoint IO. On a CPU it does not offload gathered parameters: that would free the only copy."""

    def save_unsharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _without_offload():
            super().save_unsharded_model(model, *args, **kwargs)

    def save_sharded_model(self, model: ModelWrapper, *args: Any, **kwargs: Any) -> None:
        with _without_offload():
            super().save_sharded_model(model, *args, **kwargs)


@contextmanager
def _without_offload() -> Iterator[None]:
    if get_accelerator().name != "cpu":
        yield
        return

    def in_place(offload_to_cpu: bool = False, rank0_only: bool = False) -> FullStateDictConfig:
        return FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)

    torch_fsdp_plugin.FullStateDictConfig = in_place
    try:
        yield
    finally:
        torch_fsdp_plugin.FullStateDictConfig = FullStateDictConfig
