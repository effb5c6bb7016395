"""Make the balancer of a model: its layers and blocks, checks, and the groups in which ranks communicate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from ..layers.block import Block, attach_blocks
from ..layers.dropout.residual_dropout import draw_residual_dropout_equally
from ..layers.language_head.head_block import attach_head_blocks
from ..layers.linear import HeteroLinear, hetero_layers
from ..layers.transport import Transport
from .apply import columns_stay
from .balancer import Balancer
from .config import BalanceConfig
from .host_messages import make_groups
from .measure.clock import IterationClock
from .resharding import OptimizerMemory, Resharding

__all__ = ["attach_balancer"]


def attach_balancer(
    model: nn.Module,
    config: BalanceConfig,
    clock: IterationClock,
    tp_group: dist.ProcessGroup,
    iterations_per_interval: int,
    memory: OptimizerMemory | None = None,
    obstacle: str | None = None,
) -> Balancer:
    """A balancer for the tensor-parallel layers of ``model``. Collective over all ranks.

    Args:
        model: the boosted model.
        config: how to balance; the same on all ranks.
        clock: the clock that the layers mark.
        tp_group: this rank's tensor-parallel group.
        iterations_per_interval: the length of an interval of the priorities.
        memory: of the model's optimizer; without it units are never given away for good.
        obstacle: why this rank cannot be balanced, if it knows a reason.

    Raises:
        ValueError: a layer has an option that the mode cannot be combined with, or ranks were given different
        ``config``.
        RuntimeError: a rank has an ``obstacle``.
    """
    layers = hetero_layers(model)
    blocks = attach_blocks(model) if config.moves_blocks else []
    if config.moves_heads:
        blocks += attach_head_blocks(model)
    if config.mode != "off":
        _check_options(layers, blocks, config)
    divided = any(layer.seq_parallel_mode is not None for layer in layers.values())  # type: ignore[attr-defined]
    if config.mode not in ("off", "resize") and not divided:
        # Migrated work is exact only if all ranks hold the same activations.
        draw_residual_dropout_equally(model, tp_group)
    groups = make_groups(tp_group)
    _check_all_ranks(config, obstacle, groups.world)

    def make_resharding(transport: Transport) -> Resharding | None:
        if memory is None or not config.reshards or not blocks:
            return None
        return Resharding(model, blocks, transport, groups.exchange, memory)

    return Balancer(layers, blocks, config, clock, groups, iterations_per_interval, make_resharding)


def _check_options(layers: Mapping[str, HeteroLinear], blocks: Sequence[Block], config: BalanceConfig) -> None:
    """Raise ValueError if a layer that would be balanced has an option that excludes it."""
    for name, layer in layers.items():
        obstacle = layer.option_obstacle()
        if obstacle is not None:
            raise ValueError(f"balance mode {config.mode!r} cannot be combined with {obstacle} (layer {name})")
        if layer.block is not None or columns_stay(config, blocks) or layer.column_obstacle() is None:
            continue
        choice = "leave sequence parallelism out, or choose mode 'auto', which balances only blocks"
        if not config.moves_blocks:
            form = "resizing" if config.mode == "resize" else "migration"
            choice = f"choose {form}='block'"
        raise ValueError(
            f"balance mode {config.mode!r} would balance the columns of layer {name}, which is in no block; that "
            f"cannot be combined with {layer.column_obstacle()}, where a rank has only a part of the sequence: {choice}"
        )


def _check_all_ranks(config: BalanceConfig, obstacle: str | None, world: dist.ProcessGroup) -> None:
    """Raise on all ranks if the configs differ, so that ranks would decide differently and wait for each other forever,
    or if a rank has an ``obstacle``."""
    everyone: list[tuple[BalanceConfig, str | None]] = [(config, obstacle)] * dist.get_world_size()
    dist.all_gather_object(everyone, (config, obstacle), group=world)
    first = everyone[0][0]
    for rank, (other, reason) in enumerate(everyone):
        if other != first:
            raise ValueError(f"ranks were given different BalanceConfigs: rank 0 {first}, rank {rank} {other}")
        if reason is not None:
            raise RuntimeError(f"rank {rank}: {reason}")
