"""Make the balancer of a model: its layers and blocks, checks, and the groups in which ranks communicate."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from colossalai.interface import ModelWrapper
from torch import nn

from ..colossalai_support.corrections import is_from, is_sharded
from ..common.ranks import of_every_rank
from ..layers.block import HOOKS, Block, attach_blocks
from ..layers.dropout import draw_residual_dropout_equally
from ..layers.language_head import attach_head_blocks
from ..layers.linear import HeteroLinear, hetero_layers
from ..layers.partial_gradients import Shapes, sum_partial_gradients
from ..layers.transport import Transport
from .apply import Applier, columns_stay
from .balancer import Balancer
from .clock import IterationClock
from .config import BalanceConfig
from .host_messages import make_groups
from .resharding import OptimizerMemory, Resharding

log = logging.getLogger(__name__)


def attach_balancer(
    model: nn.Module,
    config: BalanceConfig,
    clock: IterationClock,
    tp_group: dist.ProcessGroup,
    iterations_per_interval: int,
    memory: OptimizerMemory | None = None,
    obstacle: str | None = None,
    may_switch_off: bool = False,
    report_every: int = 50,
    on_report: Callable[[], None] | None = None,
) -> Balancer:
    """A balancer for the tensor-parallel layers of ``model``; if ``may_switch_off``, one that only measures where the
    config cannot be followed. Collective over all ranks."""
    layers = hetero_layers(model)
    groups = make_groups(tp_group)
    reports = _same_everywhere(config, report_every, on_report is not None, groups.world)
    reason = RuntimeError(obstacle) if obstacle is not None else _option_obstacle(layers, config)
    config = _possible(config, reason, may_switch_off, groups.world)
    # Only now, because blocks replace functions of the model.
    blocks = attach_blocks(model) if config.moves_blocks else []
    if config.moves_heads:
        blocks += attach_head_blocks(model)
    if config.mode != "off":
        config = _possible(config, _column_obstacle(layers, blocks, config), may_switch_off, groups.world)
    divided = any(layer.seq_parallel_mode is not None for layer in layers.values())  # type: ignore[attr-defined]
    if config.mode not in ("off", "resize") and not divided:
        # Migrated work is exact only if all ranks hold the same activations.
        draw_residual_dropout_equally(model, tp_group)
    transport, resharding = Transport(groups.migration), None
    if memory is not None and config.reshards and blocks:
        resharding = Resharding(model, blocks, transport, groups.exchange, memory)
    applier = Applier(layers, blocks, config, iterations_per_interval, transport, clock, resharding)
    return Balancer(
        *(layers, config, clock, groups, transport, applier, resharding, report_every, on_report),
        reports=reports,
        may_switch_off=may_switch_off,
    )


def _option_obstacle(layers: Mapping[str, HeteroLinear], config: BalanceConfig) -> Exception | None:
    for name, layer in layers.items() if config.mode != "off" else ():
        obstacle = layer.option_obstacle()
        if obstacle is not None:
            return ValueError(f"balance mode {config.mode!r} cannot be combined with {obstacle} (layer {name})")
    return None


def _column_obstacle(
    layers: Mapping[str, HeteroLinear], blocks: Sequence[Block], config: BalanceConfig
) -> Exception | None:
    for name, layer in layers.items():
        if layer.block is not None or columns_stay(config, blocks) or layer.column_obstacle() is None:
            continue
        choice = "leave sequence parallelism out, or choose mode 'auto', which balances only blocks"
        if not config.moves_blocks:
            choice = "choose Pruning(resizing='block')" if config.mode == "resize" else "choose migration='block'"
        return ValueError(
            f"balance mode {config.mode!r} would balance the columns of layer {name}, which is in no block; that "
            f"cannot be combined with {layer.column_obstacle()}, where a rank has only a part of the sequence: {choice}"
        )
    return None


def _same_everywhere(config: BalanceConfig, report_every: int, reports: bool, world: dist.ProcessGroup) -> bool:
    """Refuse configs and intervals that differ, because ranks would wait forever; returns if a rank ``reports``."""
    everyone = of_every_rank((config, report_every, reports), world)
    first, interval, _ = everyone[0]
    for rank, (other, every, _) in enumerate(everyone):
        if other != first:
            raise ValueError(f"ranks were given different BalanceConfigs: rank 0 {first}, rank {rank} {other}")
        if every != interval:
            raise ValueError(f"report_every must be the same on all ranks: rank 0 has {interval}, rank {rank} {every}")
    return any(each for _, _, each in everyone)


def _possible(
    config: BalanceConfig, obstacle: Exception | None, may_switch_off: bool, world: dist.ProcessGroup
) -> BalanceConfig:
    """``config`` if no rank has an ``obstacle``; otherwise mode "off" on all ranks if that is allowed, else an error on
    all."""
    obstacles = enumerate(of_every_rank(obstacle, world))
    rank, reason = next(((rank, each) for rank, each in obstacles if each is not None), (0, None))
    if reason is None:
        return config
    if not may_switch_off:
        raise type(reason)(f"rank {rank}: {reason}")
    if dist.get_rank() == 0:
        log.info("nothing is balanced, and times are only measured: %s", reason)
    return BalanceConfig(mode="off")


# A copy, such as a moving average of the weights, computes what the model does, but is not balanced. Of this package's
# hooks it has those that sum partial gradients, so that it can be trained. It shares the process groups.

_PACKAGE = __name__.partition(".")[0]


def make_copyable(model: ModelWrapper, shapes: Shapes, shared: tuple[object, ...], before: Callable[[], None]) -> None:
    """Let ``copy.deepcopy`` copy ``model``, or the model inside of it; both give a copy of the model inside."""
    innermost = model.unwrap(unwrap_peft=False)
    is_divided = any(map(is_sharded, model.parameters()))

    def copied(memo: dict[int, Any]) -> nn.Module:
        before()
        return copy_of(innermost, memo)

    def copy_of(source: nn.Module, memo: dict[int, Any]) -> nn.Module:
        made = _copy(source, shared, memo)
        if is_divided:
            made.register_state_dict_pre_hook(_refuse)
        if shapes:
            sum_partial_gradients(made, shapes)
        made.__deepcopy__ = functools.partial(copy_of, made)  # type: ignore[assignment]
        return made

    for each in (model, innermost):
        each.__deepcopy__ = copied


def _copy(model: nn.Module, shared: tuple[object, ...], memo: dict[int, Any]) -> nn.Module:
    memo.update((id(each), each) for each in (*shared, *dist.distributed_c10d._world.pg_map))
    kept = [
        (module, name, {key: hook for key, hook in getattr(module, name).items() if not is_from(hook, (_PACKAGE,))})
        for module in model.modules()
        for name in HOOKS
    ]
    memo.update((id(getattr(module, name)), type(getattr(module, name))(hooks)) for module, name, hooks in kept)
    own = vars(model).pop("__deepcopy__")
    try:
        made = copy.deepcopy(model, memo)
    finally:
        model.__deepcopy__ = own
    for module, name, hooks in kept:
        for key, hook in hooks.items():
            getattr(memo[id(module)], name)[key] = copy.deepcopy(hook, memo)
    return made


def _refuse(*_: Any) -> None:
    raise RuntimeError(
        "a copy of a tensor-parallel model has this rank's shards, but the model's state_dict() gathers whole tensors, "
        "so they cannot be averaged by state_dict: use parameters() of both (torch's AveragedModel does; for timm's "
        "ModelEmaV3 set exclude_buffers=True). To save an average, copy its parameters into the model's, and call "
        "booster.save_model"
    )
