"""Layers that move between ranks while training: exact against one process, with every rank slow once."""

import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.checkpoint_io.utils import gather_distributed_param
from torch import Tensor, nn
from torch.utils.data import Dataset

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.common.methods import wrap_method
from colossal_hetero.common.ranks import from_rank_0
from colossal_hetero.elastic.held_layers import layers_by_rank
from colossal_hetero.planner.cluster.topology import Channel, DeviceKind, Topology
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.planner.solver.follow import Caution
from colossal_hetero.plugin.hybrid import drift, link_times, live_plan, planned_run
from colossal_hetero.plugin.hybrid.drift import PassSeconds
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2, llama, loss_of, make_optimizer
from tests.parallel.plugin.unequal.test_unequal_replicas import samples as batch_of
from tests.support import training
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.layer_profiles import layer_times
from tests.support.machines import of_nodes
from tests.support.planning import predict_plan, share
from tests.support.training import make_step, tiny_vit

MICRO_BATCH, GLOBAL_BATCH, BLOCKS = 2, 8, 6
BLOCK_SECONDS = 0.1
WINDOW, PHASE = 2, 6  # iterations of a window, and of a phase in which the same rank is slow


def cluster(nodes: tuple[int, ...]) -> Topology:
    """Nodes with so many devices each."""
    memory, network = Channel("shared memory", 1e10, 1e-6), Channel("Ethernet", 1e10, 1e-6)
    return of_nodes(([DeviceKind("cpu", 10**12, 1e9)] * size, memory, (network,)) for size in nodes)


def profile(tp: int, update_seconds: float = 0.0) -> ModelProfile:
    sizes = LayerSizes(
        tensor_parallel=tp,
        parameter_bytes=(0, *(1000,) * BLOCKS, 0),
        activation_bytes=(1000,) * (BLOCKS + 2),
        output_bytes=(1000,) * (BLOCKS + 1) + (0,),
    )
    seconds = (0.0, *(BLOCK_SECONDS / 3,) * BLOCKS, 0.0)
    updates = (update_seconds,) * (BLOCKS + 2)
    times = layer_times("cpu", seconds, micro_batch=MICRO_BATCH, tensor_parallel=tp, update_seconds=updates)
    return ModelProfile(name="model", times=(times,), sizes=(sizes,))


class Clock:
    """A clock that shows what the blocks of a stage take; the rank ``slow`` is ``factor`` times slower than planned."""

    plugin: Any = None
    booster: Any = None
    slow: int | None = None
    factor = 3

    def __init__(self, schedule: Any) -> None: ...

    def end_iteration(self, counts: bool = True) -> None: ...

    def read(self) -> PassSeconds:
        stages = (stage for replica in Clock.plugin.plan.replicas for stage in replica.stages)
        own = next(stage for stage in stages if dist.get_rank() in stage.ranks)
        seconds = BLOCK_SECONDS * (own.blocks[1] - own.blocks[0]) * (Clock.factor if Clock.slow in own.ranks else 1)
        return PassSeconds(seconds / 3, seconds * 2 / 3)


MODELS = dict(gpt2=partial(gpt2, BLOCKS), llama=partial(llama, BLOCKS), vit=partial(tiny_vit, depth=BLOCKS))


class Samples(Dataset[dict[str, Tensor]]):
    def __init__(self, case: "Case", batches: int) -> None:
        whole = [batch_of(case.model, number, case.size, case.dtype) for number in range(batches)]
        self._samples = [
            {key: each[index] for key, each in batch.items()} for batch in whole for index in range(case.size)
        ]

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._samples[index]


class Case(NamedTuple):
    model: str
    kind: str
    nodes: tuple[int, ...]
    options: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    planning: dict[str, Any] = {}  # noqa: RUF012
    tp: int = 1
    dtype: torch.dtype = torch.float64
    moves: int = 3
    factor: float = 3  # by which ranks become slower
    idle: tuple[int, ...] = ()  # ranks that are left idle
    turns: int = 1  # of each rank to be slow
    rests: bool = False  # nobody is slow between two of them

    @property
    def max_norm(self) -> float:
        """Colossal-AI computes norms in fp32, layer sums in the precision of the gradients."""
        return 0.5 if self.planning.get("layer_sums") or self.dtype == torch.float32 else 0.0

    @property
    def size(self) -> int:
        """Samples of a global batch, of which replicas have unequal parts with layer sums. Tensor parallelism takes
        long on few cores."""
        return (2 if self.planning.get("layer_sums") else 1) * GLOBAL_BATCH // self.tp

    @property
    def slow(self) -> list[int | None]:
        """The rank that is slow in each phase, one of each stage; nobody in the first and the last one."""
        ranks = [*reversed(range(0, sum(self.nodes), self.tp))] * self.turns
        return [None, *([each for rank in ranks for each in (rank, None)] if self.rests else [*ranks, None])]


def train_alone(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    module = MODELS[case.model]().to(case.dtype)
    optimizer = make_optimizer(module, case.kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    batches = [batch_of(case.model, step, case.size, case.dtype) for step in range(PHASE * len(case.slow))]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(model(**({"x": batch["x"]} if case.model == "vit" else batch)), batch)

    losses = training.train_alone(module, optimizer, batches, loss, case.max_norm, schedule)
    return losses, {name: each.detach() for name, each in module.named_parameters(remove_duplicate=False)}


def plugin_of(case: Case) -> HeteroHybridParallelPlugin:
    # ZeRO gains where the optimizer's step takes time.
    shards = case.planning.get("zero_stages") == (0, 1)
    measured = profile(case.tp, 0.1 * shards).model_copy(update={"rank_devices": ("cpu",) * sum(case.nodes)})
    planning = PlanConfig(cluster=cluster(case.nodes), profile=measured, global_batch_size=case.size, **case.planning)
    given = dict(plan="auto", planning=planning, tp_size=case.tp, max_norm=case.max_norm) | case.options
    if planning.zero_stages == (1,):
        return ExactZero(precision="bf16", **given)
    return HeteroHybridParallelPlugin(**dict(precision="fp32") | given)


class ExactZero(HeteroHybridParallelPlugin):
    """ZeRO in fp32; Colossal-AI offers only half precision with it. Master weights are always fp32."""

    def _build(self, *args: Any, **arguments: Any) -> None:
        super()._build(*args, **arguments)
        self.precision = "exact"
        self.zero_config["forced_dtype"] = None


@contextmanager
def slowed(case: Case) -> Iterator[Any]:
    """A plugin of which ranks are as slow as :class:`Clock` says."""
    with (
        patch.object(drift, "StageClock", Clock),
        patch.object(planned_run, "WINDOW", WINDOW),
        patch.object(live_plan, "_iteration_seconds", lambda _: None),  # the ranks are not slow in truth
        patch.multiple(Clock, slow=None, factor=case.factor),
    ):
        Clock.plugin = plugin_of(case)
        yield Clock.plugin


def boosted(plugin: Any, case: Case, data: Any = None, module: nn.Module | None = None) -> tuple[Any, ...]:
    """The booster, the model, the optimizer, a loader of ``data`` if there are some, and a schedule."""
    module, booster = MODELS[case.model]().to(case.dtype) if module is None else module, Booster(plugin=plugin)
    loader, optimizer = None if data is None else plugin.prepare_dataloader(data), make_optimizer(module, case.kind)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    model, optimizer, _, loader, schedule = booster.boost(module, optimizer, loss_of, loader, schedule)
    return booster, model, optimizer, loader, schedule


@if_thorough(2, Case("vit", "sgd", (1, 1), dict(pp_size=2)))
@on(2, Case("gpt2", "adamw", (1, 1), dict(pp_size=2), moves=6, turns=3))
@on(2, Case("llama", "sgd", (1, 1), dict(pp_size=2)))
@if_thorough(2, Case("gpt2", "sgd", (1, 1), dict(pp_size=2), dtype=torch.float32))
@on(3, Case("gpt2", "adamw", (1, 1, 1), dict(pp_size=3), moves=4))
@if_thorough(4, Case("gpt2", "adamw", (1, 1, 1, 1), dict(pp_size=2), moves=3))
@on(4, Case("llama", "sgd", (2, 2), dict(pp_size=2), tp=2, dtype=torch.float32, moves=2))
@on(4, Case("vit", "sgd", (1, 1, 1, 1), dict(pp_size=2), dict(zero_stages=(1,)), dtype=torch.float32, moves=3))
@on(3, Case("gpt2", "adamw", (1, 1, 1), {}, dict(layer_sums=True), moves=4))
@if_thorough(4, Case("vit", "sgd", (1, 1, 1, 1), {}, dict(layer_sums=True), moves=5))
@if_thorough(3, Case("vit", "sgd", (1, 1, 1), {}, dict(layer_sums=True), moves=4, factor=50, idle=(1, 2)))
@on(3, Case("vit", "sgd", (1, 1, 1), {}, dict(layer_sums=True, zero_stages=(1,)), 1, torch.float32, 4, 50, (1, 2)))
@if_thorough(2, Case("gpt2", "adamw", (1, 1), {}, dict(layer_sums=True), factor=50, idle=(1,)))
@on(2, Case("llama", "adamw", (1, 1), {}, dict(layer_sums=True, zero_stages=(0, 1)), 1, torch.float32, 3, 50, (1,)))
@on(4, Case("vit", "sgd", (1, 1, 1, 1), dict(pp_size=2), dict(layer_sums=True), factor=50, idle=(1, 2, 3)))
@on(4, Case("llama", "sgd", (2, 2), {}, dict(layer_sums=True), 2, torch.float32, 4, factor=50, idle=(2, 3), rests=True))
def moves_change_nothing(case: Case) -> None:
    expected_losses, expected = train_alone(case)
    steps, losses = PHASE * len(case.slow), []
    with (
        slowed(case) as plugin,
        patch.object(Caution, "moved", lambda *_: None),  # who is slow changes often here
        patch.object(drift, "CALM", WINDOW),
        patch.object(live_plan.gc, "collect", side_effect=AssertionError("the old model is not free")),
        patch.object(
            drift.IdleClock, "work_per_second", lambda *_: 1 / (case.factor if Clock.slow == dist.get_rank() else 1)
        ),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("error", message="layers have moved")
        data = Samples(case, steps) if case.planning.get("layer_sums") else None
        booster, model, optimizer, loader, schedule = boosted(plugin, case, data)
        batches = own_batches(case, plugin, loader, steps)
        for step in range(steps):
            Clock.slow = case.slow[step // PHASE]
            result = booster.execute_pipeline(batches, model, loss_of, optimizer, return_loss=True)
            make_step(optimizer)
            schedule.step()
            part = plugin.plan.replicas[plugin.replica()[0]].micro_batches * MICRO_BATCH / case.size
            if data is not None and case.tp == 1 and step == 2 * PHASE - 1:
                assert plugin.plan_changes  # ranks have changed their places
                check_saved(booster, model)
            losses.append(
                None if result["loss"] is None or dist.get_rank(plugin.tp_group) else float(result["loss"]) * part
            )
    tolerance = 1e-9 if case.dtype == torch.float64 else 1e-5
    if case.model == "llama":  # its norms compute in fp32; a run without moves differs as much from one process
        tolerance = max(tolerance, 1e-7)
    for step, parts in enumerate(zip(*of_all_ranks(losses), strict=True)):
        found = sum(part for part in parts if part is not None)
        # Schedules sum losses in fp32.
        assert found == pytest.approx(expected_losses[step], rel=100 * max(tolerance, 1e-8)), step
    for name, each in model.unwrap().named_parameters(remove_duplicate=False):
        found = gather_distributed_param(each, keep_vars=False)[: len(expected[name])]
        torch.testing.assert_close(found, expected[name], rtol=tolerance, atol=tolerance, msg=name)
    assert len(plugin.plan_changes) >= case.moves
    used = [layers_by_rank(change.after).keys() for change in plugin.plan_changes]
    assert {rank for each in used for rank in range(dist.get_world_size()) if rank not in each} == {*case.idle}
    assert len(used[-1]) == dist.get_world_size()


def check_saved(booster: Booster, model: Any) -> None:
    path = Path(from_rank_0(tempfile.mkdtemp)) / "model.pt"
    booster.save_model(model, str(path))
    dist.barrier()
    saved = torch.load(path, weights_only=True)
    for name, each in whole(model).items():
        torch.testing.assert_close(saved[name], each[: len(saved[name])], msg=name)


def whole(model: Any) -> dict[str, Tensor]:
    """The parameters of all ranks, without tensor parallelism."""
    own = {name: each.detach().clone() for name, each in model.unwrap().named_parameters()}
    return {name: each for of_rank in of_all_ranks(own) for name, each in of_rank.items()}


def own_batches(case: Case, plugin: Any, loader: Any, steps: int) -> Iterator[dict[str, Tensor]]:
    if loader is not None:
        yield from loader
    for step in range(steps):
        batch = batch_of(case.model, step, case.size, case.dtype)
        yield {key: each[share(plugin)] for key, each in batch.items()}


@on(3, 3, (0,))
@if_thorough(4, 3, (0,))
@on(3, 50, (0,))
@on(2, 50, (0, 1))
def loaders_and_checkpoints_belong_to_the_new_replicas(factor: int, zero_stages: tuple[int, ...], folder: Path) -> None:
    """Loaders from before a move, which brings ranks into other replicas, or leaves the last one idle. With ZeRO, the
    replica that is left alone saves without it, and two go on with it."""
    ranks, dtype = dist.get_world_size(), torch.float64 if zero_stages == (0,) else torch.float32
    options = dict(checkpoints=CheckpointConfig(shared=folder))
    planning = dict(layer_sums=True, zero_stages=zero_stages)
    case = Case("vit", "sgd", (1,) * ranks, options, planning, dtype=dtype, factor=factor)
    steps, data = PHASE * 2, Samples(case, 3)
    with slowed(case) as plugin:
        held_out, other = plugin.prepare_dataloader(data, batch_size=2), plugin.prepare_dataloader(data)
        booster, model, optimizer, loader, _ = boosted(plugin, case, Samples(case, steps))
        batches = iter(loader)
        for step in range(steps):
            if step in (1, steps - 1):
                assert bool(plugin.plan_changes) == (step > 1)
                found = evaluate(booster, model, held_out)
                alone = MODELS["vit"]().to(dtype)
                alone.load_state_dict(whole(model))
                with torch.no_grad():
                    expected = [
                        loss_of(alone(each["x"][None]), {key: value[None] for key, value in each.items()})
                        for each in data
                    ]
                assert found == (pytest.approx(float(torch.stack(expected).mean()), rel=1e-6), len(data)), step
            Clock.slow = ranks - 1
            booster.execute_pipeline(batches, model, loss_of, optimizer)
            make_step(optimizer)
    sizes = dict(of_all_ranks((plugin.replica()[0], len(next(iter(other))["x"]))))
    assert sizes == {at: MICRO_BATCH * each.micro_batches for at, each in enumerate(plugin.plan.replicas)}
    assert (ranks - 1 in layers_by_rank(plugin.plan)) == (factor == 3)
    plugin.save(model, optimizer, dataloader=loader, step=steps)
    plugin.wait_for_saves()
    again = plugin_of(case)
    _, made, optimizer, *_ = boosted(again, case, data, tiny_vit(depth=BLOCKS, seed=5).to(dtype))
    assert again.resume(made, optimizer).step == steps
    found, expected = whole(made), whole(model)
    assert found.keys() == expected.keys() and all(torch.equal(found[name], each) for name, each in expected.items())


@on(2, 0)
@on(2, 1)
def waiting_for_a_slow_replica_is_not_measured_as_work(zero_stage: int) -> None:
    planning = dict(layer_sums=True, zero_stages=(zero_stage,))
    case, slow, steps = Case("vit", "sgd", (1, 1), {}, planning, dtype=torch.float32), 0.2, 2 * WINDOW
    with patch.object(planned_run, "WINDOW", WINDOW), patch.object(live_plan.LivePlan, "before_passes"):
        plugin, module = plugin_of(case), MODELS["vit"]()
        if dist.get_rank():
            module.blocks[0].register_forward_pre_hook(lambda *_: time.sleep(slow))
        booster, model, optimizer, loader, _ = boosted(plugin, case, Samples(case, steps), module)
        for batches in loader.rest_of_epoch():
            booster.execute_pipeline(batches, model, loss_of, optimizer)
            make_step(optimizer)
    seconds = {stage.ranks: stage.measured.seconds for stage in plugin.drift.stages}
    assert seconds[1,] > slow > 2 * seconds[0,], seconds


@on(3)
@on(2, (0, 1))
def an_idle_rank_follows_the_loss_scale(zero_stages: tuple[int, ...] = (0,)) -> None:
    """With ZeRO, the replica that is left has an optimizer of another kind."""
    options = dict(precision="fp16", initial_scale=2**8, growth_interval=3)
    ranks, planning = dist.get_world_size(), dict(layer_sums=True, zero_stages=zero_stages)
    case, steps = Case("vit", "sgd", (1,) * ranks, options, planning, dtype=torch.float32, factor=50), 12
    with slowed(case) as plugin:
        Clock.slow = ranks - 1
        booster, model, optimizer, loader, _ = boosted(plugin, case, Samples(case, steps))
        for batches in loader.rest_of_epoch():
            booster.execute_pipeline(batches, model, loss_of, optimizer)
            make_step(optimizer)
    assert layers_by_rank(plugin.plan).keys() == {*range(ranks - 1)}
    assert of_all_ranks(float(optimizer.mixed_precision.grad_scaler.scale)) == [2 ** (8 + steps // 3)] * ranks


def evaluate(booster: Booster, model: Any, loader: Any) -> tuple[float, int]:
    """Mean loss over all samples, and their number."""
    total, samples, batches = 0.0, 0, iter(loader)
    with torch.no_grad():
        for _ in range(len(loader)):
            result = booster.execute_pipeline(batches, model, loss_of, return_loss=True)
            if booster.plugin.is_last_stage():
                total, samples = total + float(result["loss"]) * loader.batch_size, samples + loader.batch_size
    of_all = of_all_ranks((total, samples))
    return sum(each for each, _ in of_all) / sum(each for _, each in of_all), sum(each for _, each in of_all)


# What a script does with its model ------------------------------------------------------------------------------------


def slow_soon(
    script: Callable[..., Any] = lambda *_: None,
    module: nn.Module | None = None,
    steps: int = 8,
    dtype: Any = torch.float64,
    nodes: tuple[int, ...] = (1, 1),
    straggler: int | None = 1,
    factor: float = 3,
    keeps_gradients: bool = False,
    prepare: Callable[[Any], None] = lambda plugin: None,
    **options: Any,
) -> tuple[Any, Any, list[str]]:
    """Train a ViT of which a rank is slow from the third step on; ``script(step, model, optimizer)`` runs before each
    step. Returns the plugin, the model, and what rank 0 prints."""
    case = Case("vit", "sgd", nodes, dict(pp_size=len(nodes)) | options, dtype=dtype, factor=factor)
    with slowed(case) as plugin, patch.object(live_plan, "print_on_rank_0") as printed:
        prepare(plugin)
        Clock.booster, module, optimizer, *_ = boosted(plugin, case, module=module)
        batches = own_batches(case, plugin, None, steps)
        for step in range(steps):
            Clock.slow = straggler if step > 1 else None
            script(step, module, optimizer)
            Clock.booster.execute_pipeline(batches, module, loss_of, optimizer)
            optimizer.step() if keeps_gradients else make_step(optimizer)
    return plugin, module, [call.args[0] for call in printed.call_args_list]


@on(3)
def a_slow_link_is_named() -> None:
    """Messages between ranks 1 and 2 wait for a moment, beginning in the fifth step."""
    slow, delay = 0.03, [0.0]

    def wait(neighbor: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if {dist.get_rank(), neighbor} == {1, 2}:
            time.sleep(delay[0])
        return method(*args, **kwargs)

    def prepare(plugin: Any) -> None:
        comm = plugin.scheduler.comm
        stages = comm.stage_manager
        for name, (side, sends, _) in link_times._METHODS.items():
            if sends:
                neighbor = stages.get_next_rank() if side > 0 else stages.get_prev_rank()
                wrap_method(comm, name, partial(wait, neighbor))

    def script(step: int, *_: Any) -> None:
        delay[0] = slow if step > 3 else 0.0

    plugin, _, (words,) = slow_soon(script, steps=10, nodes=(1, 1, 1), straggler=None, prepare=prepare)
    assert re.match(r"after step 8, the link between rank 1 on n1 and rank 2 on n2 takes \S+ ms", words), words
    fast, measured = plugin.drift.links
    assert fast.ranks == (0, 1) and not fast.matters and fast.seconds < slow / 2
    assert measured.ranks == (1, 2) and measured.matters and slow < measured.seconds < 2 * slow


@on(2)
def a_device_that_had_better_idle_is_named() -> None:
    plugin, _, printed = slow_soon(steps=12, factor=20)
    assert plugin.plan.layers_per_stage == (5, 1)
    if dist.get_rank() == 0:
        assert [each for each in printed if each.startswith("after step 6, a plan without rank 1 is faster: ")]


@on(2)
def layers_move_back_if_iterations_become_longer() -> None:
    """Whatever is predicted, iterations take twice as long with other cuts than the first ones."""

    def measured(_: Any) -> float:
        return 1.0 if Clock.plugin.plan.layers_per_stage == (3, 3) else 2.0

    plugin, _, printed = slow_soon(steps=20, prepare=lambda _: setattr(live_plan, "_iteration_seconds", measured))
    cuts = [(each.after.layers_per_stage, each.is_back) for each in plugin.plan_changes]
    assert cuts == [((5, 1), False), ((3, 3), True)]  # and stay there
    if dist.get_rank() == 0:
        assert "layers 5+1 became 3+3 again: 1.000 s instead of 2.000 s per iteration were measured" in printed[-1]


@on(2)
def devices_that_the_plan_leaves_out_are_not_taken_for_others() -> None:
    """The plan is for the first and the last one of three; the profile has no times of the other one."""
    whole, measured = cluster((1, 1, 1)), profile(1)
    other = replace(whole.devices[1], kind=replace(whole.devices[1].kind, name="cpu-old"))
    topology = replace(whole, devices=(whole.devices[0], other, whole.devices[2]))
    plan = predict_plan(topology, measured, [[(0,), (2,)]], micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
    planning = PlanConfig(cluster=topology, profile=measured, global_batch_size=GLOBAL_BATCH, follow_speed=True)
    plugin, *_ = slow_soon(plan=plan, planning=planning)
    assert plugin.plan.layers_per_stage == (5, 1)
    assert [stage.node for stage in plugin.plan.replicas[0].stages] == ["n0", "n2"]
    with pytest.raises(ValueError, match=r"stage 1 of replica 0 is on cpu, but rank 1 of the cluster is cpu-old; give"):
        moved = predict_plan(whole, measured, [[(0,), (1,)]], micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH)
        HeteroHybridParallelPlugin(plan=moved, planning=planning, precision="fp32")


@on(2)
def hooks_modes_and_frozen_parameters_move_along_and_a_script_that_keeps_parts_of_the_model_is_warned() -> None:
    calls, kept = list[nn.Module](), list[Any]()

    class Recorder:
        """A script's own object, which is not copied with the model."""

        def record(self, block: nn.Module, *_: Any) -> None:
            calls.append(block)

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("copied")

    def switch(step: int, model: Any, optimizer: Any) -> None:
        if step == 0:
            kept.extend(model.parameters())
        elif step == 1:
            torch.manual_seed(100 + dist.get_rank())
            model.train()
            for number, block in model.unwrap().blocks.named_children():
                if number in "04":
                    block.mlp.eval()
                    block.attn.requires_grad_(False)

    def hooked() -> nn.Module:
        module = MODELS["vit"]().double().eval()
        for block in module.blocks:
            block.register_forward_hook(Recorder().record)
        return module

    words = r"still has a part of the model from before, \S+, which is not trained any more"
    with pytest.warns(UserWarning, match=words):
        plugin, model, _ = slow_soon(switch, hooked())
    assert plugin.plan.layers_per_stage == (5, 1) and model.training
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(100 + dist.get_rank()))
    own = {name: each for name, each in model.unwrap().blocks.named_children() if any(True for _ in each.parameters())}
    assert len(own) == (1 if dist.get_rank() else 5) and calls[-len(own) :] == [*own.values()]
    for number, block in own.items():
        assert block.training and block.mlp.training == block.mlp.fc1.training == (number not in "04"), number
        assert {each.requires_grad for each in block.attn.parameters()} == {number not in "04"}, number


@on(2)
def layers_stay_where_a_move_would_lose_what_the_script_has_added() -> None:
    def add_hook(step: int, model: Any, optimizer: Any) -> None:
        if step == 2 and dist.get_rank() == 1:
            model.unwrap().blocks.register_forward_pre_hook(lambda *_: None)

    def add_group(step: int, model: Any, optimizer: Any) -> None:
        if step == 1:
            optimizer.optim.add_param_group(dict(params=[nn.Parameter(torch.zeros(1))]))

    for options, words in (
        (dict(script=add_hook), "blocks got a hook after booster.boost"),
        (dict(keeps_gradients=True), "has a gradient from before the last step"),
        (dict(script=add_group), "parameter groups changed after booster.boost"),
    ):
        plugin, _, printed = slow_soon(**options)
        assert plugin.plan.layers_per_stage == (3, 3) and not plugin.plan_changes
        assert len(printed) == 1 and words in printed[0] and "follow_speed=False" in printed[0]


@on(2, "fp16")
@if_thorough(2, "bf16")
def masters_and_the_loss_scale_move_along(precision: str) -> None:
    """The run without moves has the same masters, but for the rounding of half precision."""
    scales: list[float] = []

    def note(step: int, model: Any, optimizer: Any) -> None:
        if precision == "fp16":
            scales.append(float(optimizer.mixed_precision.grad_scaler.scale))

    options = dict(precision=precision) | (dict(initial_scale=2**8, growth_interval=3) if precision == "fp16" else {})
    found: list[dict[str, Tensor]] = []
    for follow in (True, False):
        stays = patch.object(live_plan.LivePlan, "before_passes", lambda _: None)
        with nullcontext() if follow else stays:
            plugin, model, _ = slow_soon(note, MODELS["vit"](), dtype=torch.float32, **options)
        assert plugin.plan.layers_per_stage == ((5, 1) if follow else (3, 3))
        own = {name: each.detach().float() for name, each in model.unwrap().named_parameters()}
        found.append({name: each for of_rank in of_all_ranks(own) for name, each in of_rank.items()})
    torch.testing.assert_close(found[0], found[1], rtol=0.02, atol=2e-3)
    half = len(scales) // 2
    assert scales[:half] == scales[half:] and (precision == "bf16" or scales[0] < scales[half - 1])


@on(2)
def checkpoints_before_and_after_a_move_are_whole() -> None:
    """The second one, saved with other cuts, is read by a run without moves. The first is still written when layers
    move."""
    folder, kept = Path(from_rank_0(tempfile.mkdtemp)), []

    def save(step: int, model: Any, optimizer: Any) -> None:
        kept[:] = [optimizer]
        if step == 6:  # layers move in the passes that follow
            Clock.plugin.save(model, optimizer, step=6)

    options = dict(checkpoints=CheckpointConfig(shared=folder))
    plugin, model, _ = slow_soon(save, **options)
    assert plugin.plan.layers_per_stage == (5, 1)
    plugin.save(model, kept[0], step=8)
    plugin.wait_for_saves()
    expected = whole(model)
    check_saved(Clock.booster, model)
    case = Case("vit", "sgd", (1, 1), dict(pp_size=2) | options, dict(follow_speed=False))
    _, again, optimizer, *_ = boosted(other := plugin_of(case), case, module=tiny_vit(depth=BLOCKS, seed=5).double())
    assert other.resume(again, optimizer).step == 8 and other.plan.layers_per_stage == (3, 3)
    found = whole(again)
    assert all(torch.equal(found[name], each) for name, each in expected.items()) and found.keys() == expected.keys()
    assert other.resume(again, optimizer, step=6).step == 6
