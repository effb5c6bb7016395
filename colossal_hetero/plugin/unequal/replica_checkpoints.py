"""Colossal-AI's checkpoints where several ranks hold a layer: one of them writes it, and each loads the whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from colossalai.checkpoint_io import HybridParallelCheckpointIO
from torch import Tensor
from torch.distributed.distributed_c10d import GroupMember

__all__ = ["ReplicaCheckpointIO"]


class ReplicaCheckpointIO(HybridParallelCheckpointIO):
    """``HybridParallelCheckpointIO`` for replicas that are not alike.

    With ZeRO, each parameter's optimizer state is divided among the ranks that hold this parameter.

    Args:
        writes: whether this rank's replica writes: the first one.
        args: see ``HybridParallelCheckpointIO``.
    """

    use_zero: bool
    global_dp_size: int

    def __init__(self, writes: bool, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writes = writes
        self.dp_rank = 0 if writes else 1  # what the parent class tells them by

    def save_sharded_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """See ``HybridParallelCheckpointIO.save_sharded_optimizer``."""
        with self._whole_states(optimizer):
            if self._writes:
                super().save_sharded_optimizer(optimizer, *args, **kwargs)

    def save_unsharded_optimizer(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """See ``HybridParallelCheckpointIO.save_unsharded_optimizer``."""
        with self._whole_states(optimizer):
            if self._writes:
                super().save_unsharded_optimizer(optimizer, *args, **kwargs)

    def load_states_into_optimizer(self, optimizer: Any, state_dict: Mapping[Any, Any], id_map: dict) -> None:
        """See ``HybridParallelCheckpointIO.load_states_into_optimizer``."""
        if not self.use_zero:
            super().load_states_into_optimizer(optimizer, state_dict, id_map)
            return
        for key, state in state_dict.items():
            if int(key) in id_map:
                with self._among(_holders(optimizer, id_map[int(key)])):
                    super().load_states_into_optimizer(optimizer, {key: state}, id_map)

    @contextmanager
    def _among(self, group: dist.ProcessGroup) -> Iterator[None]:
        """States that are loaded in the block are divided among these ranks."""
        before = self.global_dp_size, self.dp_rank
        self.global_dp_size, self.dp_rank = dist.get_world_size(group), dist.get_rank(group)
        try:
            yield
        finally:
            self.global_dp_size, self.dp_rank = before

    @contextmanager
    def _whole_states(self, optimizer: Any) -> Iterator[None]:
        """In the block, the optimizer has the whole state of each parameter, as without ZeRO. Called by all ranks."""
        if not self.use_zero:
            yield
            return
        sharded = optimizer.optim.state
        # All ranks gather in the order of the model's parameters.
        masters = [master for group in optimizer.optim.param_groups for master in group["params"]]
        optimizer.optim.state = {
            master: _gathered(sharded[master], optimizer, master) for master in masters if master in sharded
        }
        self.use_zero = False
        try:
            yield
        finally:
            self.use_zero = True
            optimizer.optim.state = sharded


def _holders(optimizer: Any, master: Tensor) -> Any:
    group = optimizer.param_to_pg[optimizer.get_master_to_working_map()[id(master)]]
    assert group is not GroupMember.NON_GROUP_MEMBER
    return group


def _gathered(state: Mapping[str, Any], optimizer: Any, master: Tensor) -> dict[str, Any]:
    parameter = optimizer.get_master_to_working_map()[id(master)]
    group = _holders(optimizer, master)
    whole = dict(state)
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == master.shape:
            parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, value.contiguous(), group=group)
            whole[name] = torch.cat([part.flatten() for part in parts])[: parameter.numel()].view_as(parameter)
    return whole
