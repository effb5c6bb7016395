"""The part of the hybrid plugin that balances tensor-parallel layers over the ranks of their group."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from colossalai.booster.plugin import HybridParallelPlugin, hybrid_parallel_plugin
from colossalai.checkpoint_io import CheckpointIO
from colossalai.interface import ModelWrapper, OptimizerWrapper
from colossalai.shardformer.layer import _operation, loss, utils
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from ...balance.attach import attach_balancer, make_copyable
from ...balance.balancer import Balancer
from ...balance.clock import IterationClock, make_clock
from ...balance.config import BalanceConfig
from ...balance.host_messages import launch_obstacle
from ...checkpoint.optimizer_memory import masters_of
from ...colossalai_support.accelerator import SET_CONNECTIONS_LATE, get_accelerator
from ...colossalai_support.corrections import replaced
from ...colossalai_support.gpu_over_gloo import is_gpu_over_gloo
from ...common.methods import wrap_method
from ...data_parallel.busy_timer import calling_after_last_gradient
from ...layers.block import asks_for_heads
from ...layers.linear import hetero_layers
from ...layers.partial_gradients import Shapes, shapes_of
from ...layers.policy import hetero_policy
from ...layers.unit_mover import StateSlot, put_data
from ...profiling.preserved_state import inner_optimizer
from ..training_objects import TrainingObjects
from ..zero.elementwise_updates import ELEMENTWISE
from ..zero.overlapped_optimizer import OverlappedZeroOptimizer


@dataclass(frozen=True, eq=False)
class _Attached:
    balancing: LayerBalancing
    balancer: Balancer
    memory: HybridOptimizerMemory
    clock: IterationClock


_ATTACHED: WeakKeyDictionary[nn.Module, ReferenceType[_Attached]] = WeakKeyDictionary()


class LayerBalancing:
    """Replaces parallel linear layers by layers that can be balanced, and measures and balances them in training."""

    def __init__(
        self,
        config: BalanceConfig,
        is_elastic: bool,
        may_switch_off: bool,
        report_every: int,
        on_report: Callable[[], None] | None,
    ) -> None:
        self.balancer: Balancer | None = None  # of the model that was configured last
        self._config = config
        self._is_elastic = is_elastic
        self._may_switch_off, self._report_every, self._on_report = may_switch_off, report_every, on_report
        self._balancers: list[ReferenceType[Balancer]] = []  # of all models
        self._shapes: WeakKeyDictionary[nn.Module, Shapes] = WeakKeyDictionary()  # whole shapes of its parameters

    def hetero_layers(self, plugin: HybridParallelPlugin, model: nn.Module) -> AbstractContextManager[None]:
        """Let ``plugin`` configure ``model`` with layers that can be balanced. Afterwards its policy is restored,
        because the next model may need another one. Raises ``ValueError`` if ``model`` was configured before."""
        if isinstance(model, ModelWrapper):
            return nullcontext()
        if hetero_layers(model):
            raise ValueError(
                f"this {type(model).__name__} was given to booster.boost before, which has divided its layers; to "
                "boost another optimizer, give booster.boost the model that it has returned"
            )
        self._shapes[model] = shapes_of(model)
        return replaced(plugin, custom_policy=hetero_policy(plugin.custom_policy or model))

    def attach(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        model, optimizer = objects.model, objects.optimizer
        innermost = model.unwrap(unwrap_peft=False)
        attached = _ATTACHED.get(innermost, lambda: None)()
        if attached is not None and attached.balancing is not self and attached.balancer.active:
            attached.balancer.switch_off("another plugin has boosted the model")
        if attached is None or (attached.balancing is not self and not attached.balancer.active):
            attached = self._attached(plugin, objects)
            _ATTACHED[innermost] = ref(attached)
        else:
            self._check_second(attached, plugin, objects)
            attached.memory.add(optimizer)
        # If the model was boosted before, Colossal-AI has taken the divided shapes for the whole ones, in checkpoints.
        known, shapes = optimizer.param_info["param2shape"], self._shapes.get(innermost, {})
        for name, parameter in innermost.named_parameters():
            if id(parameter) in known:
                known[id(parameter)] = shapes.get(name, known[id(parameter)])
        balancer, clock = attached.balancer, attached.clock
        if hasattr(plugin.scheduler, "backward_step"):
            _count_as_communication(optimizer, "step", clock)
        elif plugin.scheduler is None:
            time_end_of_backward(optimizer, lambda: balancer.running_clock)
        time_late_parameters(optimizer, lambda: balancer.running_clock)
        optimizer.optim.register_step_pre_hook(lambda *_: balancer.before_step())

        def step_and_tick(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            balancer.tick()
            return result

        wrap_method(optimizer, "step", step_and_tick)
        _forget_on_new_scale(optimizer, balancer)

    def _attached(self, plugin: HybridParallelPlugin, objects: TrainingObjects) -> _Attached:
        model, optimizer = objects.model, objects.optimizer
        obstacle = None
        if self._config.mode not in ("off", "resize") and "nccl" in dist.get_backend(plugin.tp_group):
            obstacle = launch_obstacle(torch.cuda.nccl.version(), os.environ, SET_CONNECTIONS_LATE)
        clock = make_clock(get_accelerator().get_current_device(), is_gpu_over_gloo(plugin.tp_group))
        memory = HybridOptimizerMemory(plugin, model, optimizer, self._is_elastic)
        innermost = model.unwrap(unwrap_peft=False)
        balancer = attach_balancer(
            model,
            self._config,
            clock,
            plugin.tp_group,
            self._config.rules.priority_interval or objects.iterations_per_epoch,
            memory,
            obstacle,
            self._may_switch_off,
            self._report_every,
            None if self._on_report is None else lambda: self._tell(innermost),
        )
        self.balancer = balancer
        self._balancers.append(ref(balancer))
        attached = _Attached(self, balancer, memory, clock)
        _begin_on_forward(model, attached, _counting_passes(plugin.scheduler))
        shapes = self._shapes.get(innermost, {})
        make_copyable(model, shapes, (plugin.pg_mesh, plugin.stage_manager), balancer.keep_shapes)
        # Zero-bubble schedules have other passes, so their layers can neither be balanced nor timed.
        if hasattr(plugin.scheduler, "backward_step"):
            # Between its passes, a pipeline's stage mostly waits for other stages; this, and the sum of gradients over
            # replicas after the last pass, are not this rank's work.
            for name in ("forward_step", "backward_step"):
                _count_as_communication(plugin.scheduler, name, clock)
        return attached

    def begin_idle_iteration(self) -> None:
        """Begin an iteration in which this rank has no pass, so that it takes part in the exchange at its end."""
        assert self.balancer is not None
        self.balancer.begin(False, 1)

    def _tell(self, model: nn.Module) -> None:
        attached = _ATTACHED.get(model, lambda: None)()
        if self._on_report is not None and attached is not None and attached.balancer is self.balancer:
            self._on_report()

    def _check_second(self, attached: _Attached, plugin: HybridParallelPlugin, objects: TrainingObjects) -> None:
        if attached.balancing is not self:
            raise ValueError(
                "another plugin has boosted this model, and balances its layers; boost all of its optimizers with the "
                "booster of that plugin"
            )
        obstacle = HybridOptimizerMemory(plugin, objects.model, objects.optimizer, self._is_elastic).obstacle
        if attached.balancer.has_resharded and obstacle is not None:
            raise ValueError(
                f"units of this model were permanently re-sharded, and now {obstacle}; boost this optimizer before the "
                "first step, or set BalanceConfig(reshard_after=None)"
            )

    def _alive(self) -> list[Balancer]:
        return [balancer for reference in self._balancers if (balancer := reference()) is not None]

    @contextmanager
    def ordinary_shards(self) -> Iterator[None]:
        with ExitStack() as stack:
            for balancer in self._alive():
                stack.enter_context(balancer.ordinary_shards())
            yield

    def attach_to(self, checkpoint_io: CheckpointIO) -> None:
        """Let ``checkpoint_io`` save and load ordinary shards, and the balancer know when weights were loaded."""

        def with_ordinary_shards(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self.ordinary_shards():
                return function(*args, **kwargs)

        def load_model(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = with_ordinary_shards(function, *args, **kwargs)
            self.weights_changed()
            return result

        wrap_method(checkpoint_io, "load_model", load_model)
        for name in ("save_model", "save_optimizer", "load_optimizer"):
            wrap_method(checkpoint_io, name, with_ordinary_shards)

    def weights_changed(self) -> None:
        for balancer in self._alive():
            balancer.weights_changed()


def _counting_passes(schedule: Any) -> Callable[[], int]:
    if schedule is None:
        return lambda: 1
    numbers = itertools.count(1)

    def run(run_passes: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal numbers
        numbers = itertools.count(1)
        return run_passes(*args, **kwargs)

    wrap_method(schedule, "forward_backward_step", run)
    return lambda: next(numbers)


def _begin_on_forward(model: ModelWrapper, attached: _Attached, count: Callable[[], int]) -> None:
    """Tell the balancer of each forward pass. The hooks keep ``attached`` alive, as long as the model."""

    @torch.compiler.disable
    def begin(module: nn.Module, _: Any, arguments: dict[str, Any]) -> None:
        balancer = attached.balancer
        asks = balancer.active and asks_for_heads(module, arguments)
        if module.training and torch.is_grad_enabled():
            balancer.begin(asks, count())
            time_collectives(balancer.running_clock)
        elif not torch.is_grad_enabled():
            balancer.begin_evaluation_pass(asks)

    # On the innermost model, whose layers make the same check: the user may call or switch it without the wrappers. It
    # also runs inside the hooks by which ZeRO waits for weights that it gathers late.
    model.unwrap(unwrap_peft=False).register_forward_pre_hook(begin, with_kwargs=True)


def _count_as_communication(owner: Any, name: str, clock: IterationClock) -> None:
    """Let the time before calls of a method count as communication, and that of the calls as other work."""

    def run(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock.mark("communication")
        result = method(*args, **kwargs)
        clock.mark("other")
        return result

    wrap_method(owner, name, run)


def _forget_on_new_scale(optimizer: OptimizerWrapper, balancer: Balancer) -> None:
    """Let layers forget earlier gradients, with which they impute, when the loss scale changes or they overflow."""
    precision = getattr(optimizer, "mixed_precision", None) or getattr(optimizer, "mixed_precision_mixin", None)
    scaler = getattr(precision, "grad_scaler", None)
    if scaler is None:
        return

    def run(update: Callable[[bool], None], overflow: bool) -> None:
        before = scaler.scale
        update(overflow)
        if overflow or scaler.scale is not before:
            balancer.forget_gradients()

    wrap_method(scaler, "update", run)


# Memory of optimizers -----------------------------------------------------------------------------------------------


_STEPPED: WeakKeyDictionary[torch.optim.Optimizer, None] = WeakKeyDictionary()
"""All optimizers of this process that have made a step since the first model was boosted, in the order of these."""


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _STEPPED.setdefault(optimizer)


class HybridOptimizerMemory:
    """Memory of all optimizers of a model: the plugin's, and any of torch that steps parameters of the model."""

    def __init__(self, plugin: Any, model: Any, optimizer: OptimizerWrapper, is_elastic: bool) -> None:
        self._model, self._optimizers = model, [optimizer]
        self._masters: list[tuple[torch.optim.Optimizer, dict[int, Tensor]]] = []
        """Tensors that each optimizer updates, by the ``id`` of the model's parameter, when units were moved last."""
        self._plugin_obstacle = _plugin_obstacle(plugin, is_elastic)
        if _note_step not in _global_optimizer_pre_hooks.values():
            register_optimizer_step_pre_hook(_note_step)

    def add(self, optimizer: OptimizerWrapper) -> None:
        self._optimizers.append(optimizer)

    def _all(self) -> list[torch.optim.Optimizer | OptimizerWrapper]:
        known = {id(inner_optimizer(optimizer)) for optimizer in self._optimizers}
        parameters = {id(parameter) for parameter in self._model.module.parameters()}

        def steps_ours(optimizer: torch.optim.Optimizer) -> bool:
            return any(id(each) in parameters for group in optimizer.param_groups for each in group["params"])

        return [*self._optimizers, *(each for each in _STEPPED if id(each) not in known and steps_ours(each))]

    @property
    def obstacle(self) -> str | None:
        """Reason why units cannot change their rank for good, as a clause; None if they can."""
        of_optimizers = (_optimizer_obstacle(inner_optimizer(optimizer)) for optimizer in self._all())
        return self._plugin_obstacle or next(filter(None, of_optimizers), None)

    def prepare(self) -> None:
        """Take the model out of torch's ``DistributedDataParallel``, and note what the optimizers update. The plugin
        uses it also for a single replica, where it has nothing to sum, but copies gradients into buckets of fixed
        sizes, and keeps the graph's nodes that add them up."""
        self._masters = [(inner_optimizer(optimizer), _updated_by(optimizer)) for optimizer in self._all()]
        if isinstance(self._model.module, DistributedDataParallel):
            self._model.module = self._model.module.module
            self._model.use_ddp = False

    def slots_of(self, parameter: Tensor) -> list[StateSlot]:
        """The masters of a parameter, if they are other tensors, with their gradients; and the optimizers' state."""
        slots = []
        for optimizer, masters in self._masters:
            master = masters.get(id(parameter))
            if master is None:
                continue
            if master is not parameter:
                slots.append(StateSlot("master", master.detach(), partial(put_data, master)))
                if master.grad is not None:
                    slots.append(StateSlot("gradient of master", master.grad, partial(setattr, master, "grad")))
            state = optimizer.state.get(master, {})
            for entry, value in sorted(state.items()):
                if isinstance(value, Tensor) and value.dim() > 0:
                    slots.append(StateSlot(entry, value, partial(state.__setitem__, entry)))
        return slots


def _updated_by(optimizer: torch.optim.Optimizer | OptimizerWrapper) -> dict[int, Tensor]:
    """Tensors that an optimizer updates (without masters the parameters), by the ``id`` of the model's parameter."""
    masters = {key: found.tensor for key, found in masters_of(optimizer).items()}
    known = {id(master) for master in masters.values()}
    added = [each for group in inner_optimizer(optimizer).param_groups for each in group["params"]]
    return masters | {id(each): each for each in added if id(each) not in known}


def _plugin_obstacle(plugin: Any, is_elastic: bool) -> str | None:
    if is_elastic:
        return "elastic training moves whole layers between ranks"
    if plugin.zero_stage > 0:
        return f"ZeRO stage {plugin.zero_stage} has divided the optimizer's state into slices of fixed sizes"
    replicas = plugin.dp_size * plugin.sp_size
    if replicas > 1:
        return f"{replicas} replicas sum their gradients, which must have equal shapes"
    return None


def _optimizer_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    if type(optimizer) not in ELEMENTWISE:
        return f"{type(optimizer).__name__} is not known to update each element of a parameter by itself"
    if getattr(optimizer, "offloader", None) is not None:
        return "the optimizer's state is on an NVMe disk"
    return None


# Timed collectives ---------------------------------------------------------------------------------------------------
# Colossal-AI's own collectives count as communication of the running iteration: a rank waits for slower ones in them,
# which is not its work. Balanced layers mark the clock themselves, with their kind. Messages between two ranks (mode
# ``ring``, ring attention) and ZeRO's collectives are not timed, except for the rest of the sum over replicas at the
# end of the backward pass, and for parameters that the forward pass needs while they are still gathered.


MODULES: tuple[ModuleType, ...] = (_operation, loss, utils, hybrid_parallel_plugin)
"""Colossal-AI's modules whose collectives are timed. Each has ``torch.distributed`` under the name ``dist``."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_single")


class _TimedWork:
    """A collective that has been started: waiting for it is communication."""

    def __init__(self, work: Any, clock: IterationClock) -> None:
        self._work, self._clock = work, clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._clock.mark("other")
        result = self._work.wait(*args, **kwargs)
        self._clock.mark("communication")
        return result


class _TimedDistributed:
    """``torch.distributed`` as one module sees it: its collectives mark ``clock``, unless that is None."""

    clock: IterationClock | None = None  # of the iteration that began last; it ignores marks between iterations

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed

    def __getattr__(self, name: str) -> Any:
        collective, clock = getattr(self._distributed, name), _TimedDistributed.clock
        if clock is None or name not in COLLECTIVES:
            return collective

        def timed(*args: Any, **kwargs: Any) -> Any:
            clock.mark("other")
            work = collective(*args, **kwargs)
            clock.mark("communication")
            return work if work is None else _TimedWork(work, clock)

        return timed


def time_collectives(clock: IterationClock | None) -> None:
    """Let Colossal-AI's collectives mark ``clock`` from now on, and no other clock; None: they mark none."""
    for module in MODULES:
        if not isinstance(module.dist, _TimedDistributed):
            module.dist = _TimedDistributed(module.dist)  # type: ignore[attr-defined]
    _TimedDistributed.clock = clock


def time_end_of_backward(optimizer: OptimizerWrapper, clock_now: Callable[[], IterationClock | None]) -> None:
    """Count as communication what ``optimizer.backward`` does after the last gradient: it waits for the sum over
    replicas. ``clock_now``: the clock of the running iteration, None if it is not measured."""

    def timed_backward(backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> Any:
        clock = clock_now()
        if clock is None:
            return backward(loss, *args, **kwargs)
        with calling_after_last_gradient(loss, lambda: clock.mark("other")):
            result = backward(loss, *args, **kwargs)
        clock.mark("communication")
        return result

    wrap_method(optimizer, "backward", timed_backward)


def time_late_parameters(optimizer: OptimizerWrapper, clock_now: Callable[[], IterationClock | None]) -> None:
    """Count waiting for late parameters as communication; ``clock_now`` as in :func:`time_end_of_backward`."""

    @contextmanager
    def timed() -> Iterator[None]:
        clock = clock_now()
        if clock is not None:
            clock.mark("other")
        yield
        if clock is not None:
            clock.mark("communication")

    if isinstance(optimizer, OverlappedZeroOptimizer) and optimizer.late_parameters is not None:
        optimizer.late_parameters.waiting = timed
