"""With ``plan="auto"`` the plugin plans from a cluster and a profile when it is made. All ranks get the same plan, and
a stage whose times differ from it is reported at the end of an epoch. What does not fit a plan is refused in words.
Groups of ranks communicate over the network that their members share."""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.utils.data import TensorDataset
from transformers import T5Config, T5ForConditionalGeneration

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.common import ranks
from colossal_hetero.planner.cluster.cluster_file import save_cluster
from colossal_hetero.planner.cluster.group_networks import Adapter, Network
from colossal_hetero.planner.cluster.topology import Channel, Device, DeviceKind, Node, Topology
from colossal_hetero.planner.cost.plan import Plan, save_plan
from colossal_hetero.planner.cost.runnable import NoPlanError
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile, save_profile
from colossal_hetero.plugin.hybrid import plan_agreement
from colossal_hetero.plugin.hybrid import planned_mesh as groups
from colossal_hetero.plugin.hybrid.live_plan import follows
from colossal_hetero.plugin.hybrid.planned_mesh import make_group, ordered_group
from tests.support import training
from tests.support.checks import of_all_ranks, on, with_colossalai_passes
from tests.support.layer_profiles import layer_times
from tests.support.machines import of_nodes
from tests.support.planning import (
    MICRO_BATCH,
    MICRO_BATCHES,
    images_and_labels,
    make_plan,
    planned,
    train_alone,
    train_planned,
    unequal_plan,
)
from tests.support.training import Trained, boost, by_labels, loss_of, pipeline_step, sgd, tiny_vit

BLOCKS, GLOBAL_BATCH = 6, 16
CPU = DeviceKind("cpu", 10**9, 1e9)


def cluster(speeds: tuple[float, ...]) -> Topology:
    memory = Channel("shared memory", 1e9, 1e-5)
    devices = tuple(Device(CPU, node=0, cluster=0, speed=speed) for speed in speeds)
    node = Node("here", 0, tuple(range(len(speeds))), memory, (Channel("Ethernet", 1e8, 1e-4),))
    return Topology(devices, (node,), ("here",))


def profile(megabytes: int = 40) -> ModelProfile:
    """A profile of equal blocks, which take a millisecond per sample forward, for micro-batches of 1 and 2. If a block
    has 40 MB of parameters, summing gradients over replicas takes long, so a pipeline is the best plan."""
    layers = BLOCKS + 2
    times = tuple(layer_times("cpu", (0.0, *(1e-3 * size,) * BLOCKS, 0.0), micro_batch=size) for size in (1, 2))
    sizes = LayerSizes(
        parameter_bytes=(0, *(megabytes * 10**6,) * BLOCKS, 0),
        activation_bytes=(1000,) * layers,
        output_bytes=(1000,) * (layers - 1) + (0,),
    )
    return ModelProfile(name="tiny ViT", times=times, sizes=(sizes,))


def planning(speeds: tuple[float, ...] = (1.0, 1.0), layers: ModelProfile | None = None, **settings: Any) -> PlanConfig:
    given = dict(cluster=cluster(speeds), profile=layers or profile(), global_batch_size=GLOBAL_BATCH)
    return PlanConfig(**(given | settings))


def auto_plan(planning: PlanConfig, **options: Any) -> Plan:
    """The plan of a plugin that is not used further. Its groups are destroyed only after all ranks have made them: Gloo
    may wait forever if a group is destroyed while another rank still connects to it."""
    plugin = planned("auto", planning=planning, **options)
    dist.barrier()
    assert plugin.plan is not None
    return plugin.plan


def blocks_by_rank(plan: Plan) -> dict[tuple[int, ...], int]:
    return {stage.ranks: stage.blocks[1] - stage.blocks[0] for stage in plan.replicas[0].stages}


@on(2, False)
@on(2, True)
def plans_are_made_from_objects_and_from_files(from_files: bool, folder: Path) -> None:
    speeds, given = (1.0, 0.5), {}
    if from_files:
        if dist.get_rank() == 0:
            save_cluster(cluster(speeds), folder / "cluster.toml")
            save_profile(profile(), folder / "profile.json")
        given = dict(cluster=folder / "cluster.toml", profile=str(folder / "profile.json"))
    with patch.object(plan_agreement, "print_words") as printed:
        plugin = planned("auto", planning=planning(speeds, **given))
    words = [call.args[0] for call in printed.call_args_list]
    assert len(words) == (dist.get_rank() == 0) and all("micro-batch 1 × 16" in each for each in words)
    run = boost(plugin, tiny_vit(depth=BLOCKS), sgd)
    assert train_planned(run) == pytest.approx(train_alone(BLOCKS, GLOBAL_BATCH)[0], rel=1e-5)
    # The rank with half the speed has half as many blocks as the other. Small micro-batches make the bubble small.
    assert blocks_by_rank(plugin.plan) == {(0,): 4, (1,): 2} and plugin.plan.micro_batch == 1
    assert of_all_ranks(plugin.plan) == [plugin.plan] * 2


@on(2)
def settings_are_followed() -> None:
    plan = auto_plan(planning((1.0, 0.5), unequal=False, method="uniform", micro_batch_sizes=(2,)))
    assert plan.layers_per_stage == (3, 3) and (plan.method, plan.micro_batch) == ("uniform", 2)
    # The times measured on each rank are used, not the speed in the cluster file.
    layers = profile()
    names = ("forward_seconds", "backward_seconds")
    slow = [
        each.model_copy(
            update={"device": "cpu-2"} | {name: tuple(5 * seconds for seconds in getattr(each, name)) for name in names}
        )
        for each in layers.times
    ]
    measured = layers.model_copy(update={"times": (*layers.times, *slow), "rank_devices": ("cpu", "cpu-2")})
    assert blocks_by_rank(auto_plan(planning(layers=measured))) == {(0,): 5, (1,): 1}
    # Equal devices, and gradients that take no time to sum: replicas are the best plan, unless stages are asked for.
    assert len(auto_plan(planning(layers=profile(0))).replicas) == 2
    plan = auto_plan(planning(layers=profile(0)), pp_size=2)
    assert len(plan.replicas) == 1 and plan.layers_per_stage == (3, 3)
    # The slow rank takes a third of the samples.
    unequal = dict(speeds=(1.0, 0.5), layers=profile(0), global_batch_size=24)
    plan = auto_plan(planning(**unequal))
    samples = {replica.stages[0].ranks: replica.micro_batches * plan.micro_batch for replica in plan.replicas}
    assert samples == {(0,): 16, (1,): 8}
    # Equal replicas are made if they are asked for, or if the other arguments need them.
    assert auto_plan(planning(**unequal, unequal=False)).symmetric
    assert auto_plan(planning(**unequal), pp_size=1).symmetric
    assert auto_plan(planning(**unequal), overlap_allgather=True).symmetric
    # Without the slow rank a plan would be faster, but every rank that was started must have a place in it.
    assert auto_plan(planning((1.0, 0.01))).world_size == 2


def test_the_size_of_micro_batches_is_kept_if_there_is_a_plan_with_it() -> None:
    def agree(plan: str, planning: PlanConfig, tp_size: int | None) -> Any:
        if planning.micro_batch_sizes == (4,):
            raise NoPlanError("the model does not fit")
        return planning.micro_batch_sizes

    planning = PlanConfig(micro_batch_sizes=(1, 2, 4))
    with patch.object(plan_agreement, "agree_on_plan", agree):
        found = [plan_agreement.agree_on_next_plan(planning, None, size) for size in (2, 4, None)]
    assert found == [(2,), (1, 2, 4), (1, 2, 4)]


# Drift --------------------------------------------------------------------------------------------------------------


@on(2)
def a_stage_that_is_slow_is_reported_at_the_end_of_an_epoch() -> None:
    """The plan expects forward passes of 10 ms in both stages. In the second one they take at least 90 ms."""
    plan = make_plan([[[1], [0]]], (3, 3), MICRO_BATCH, MICRO_BATCHES, forward_seconds=[0.01, 0.01])
    model = tiny_vit(depth=plan.blocks)
    for block in model.blocks if dist.get_rank() == 0 else ():
        block.register_forward_pre_hook(lambda *_: time.sleep(0.03))
    plugin = planned(plan, planning=PlanConfig(cluster=cluster((1.0, 1.0)), profile=profile()))
    booster = Booster(plugin=plugin)

    def boosted(model: Any, iterations: int) -> Trained:
        loader = plugin.prepare_dataloader(TensorDataset(torch.zeros(iterations * MICRO_BATCH * MICRO_BATCHES)))
        model, optimizer, *_ = booster.boost(model, sgd(model), loss_of, loader)
        return Trained([], model, optimizer, booster, plugin)

    with patch.object(ranks, "print_words") as printed:
        run = boosted(model, 3)
        train_planned(run, 2)
        assert plugin.drift is None, "a report was made before the end of the epoch"
        train_planned(run, 1)
        first = plugin.drift
        with torch.no_grad():
            batches = iter([images_and_labels(0, 4)])
            loss = booster.execute_pipeline(batches, run.model, by_labels, None, True)["loss"]
        assert (loss is not None) == plugin.stage_manager.is_last_stage() and plugin.drift is first
        train_planned(run, 3)
        second = plugin.drift
        assert second is not first
        (slow,) = (stage for stage in second.drifted if stage.ranks == (0,))
        assert slow.stage == 1 and slow.measured.forward_seconds >= 0.09
        assert second.proposal.plan.layers_per_stage[1] < 3 and not plugin.plan_changes
        words = [call.args[0] for call in printed.call_args_list]
        assert bool(words) == (dist.get_rank() == 0)
        for each in words[:1]:
            assert each.startswith("epoch 1: measured times differ from the plan\nstage") and "best plan now" in each
        # For the next model, the length of an epoch is that of its own loader.
        train_planned(boosted(tiny_vit(depth=plan.blocks), 1), 1)
        assert plugin.drift is not second


PLAN = make_plan([[[1], [0]]], (1, 3), MICRO_BATCH, MICRO_BATCHES)
BATCHES = BatchConfig(global_batch_size=8)


@on(2)
def a_file_that_only_rank_0_has_is_enough(folder: Path) -> None:
    if dist.get_rank() == 0:
        save_plan(PLAN, folder / "plan.json")
    path = folder / ("plan.json" if dist.get_rank() == 0 else "only rank 0 has it")
    assert planned(path, tp_size=1, pp_size=2).plan == PLAN


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=24, d_kv=6, d_ff=36, num_heads=4, num_layers=4, num_decoder_layers=3)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


@with_colossalai_passes(2)
def an_encoder_with_a_decoder_is_divided_by_colossalai() -> None:
    """As the refusal of a plan for it says."""
    ids = torch.randint(1, 64, (MICRO_BATCH * MICRO_BATCHES, 6), generator=torch.Generator().manual_seed(1))
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    plugin = HeteroHybridParallelPlugin(1, 2, num_microbatches=MICRO_BATCHES, precision="fp32")
    run = boost(plugin, t5(), sgd)
    losses = [pipeline_step(run, iter([batch]), lambda output, _: output.loss) for _ in range(2)]
    alone = t5()
    expected = training.train_alone(alone, sgd(alone), [batch] * 2, lambda model, inputs: model(**inputs).loss)
    assert losses == ([None] * 2 if dist.get_rank() == 0 else pytest.approx(expected, rel=1e-5))


GIVEN = dict(cluster="cluster.toml", profile="profile.json", global_batch_size=8)
FOLLOWING = GIVEN | {"follow_speed": True}


@pytest.mark.parametrize(
    "plan, planning, batches, is_elastic, expected",
    [
        ("auto", GIVEN, None, False, True),
        ("auto", GIVEN | {"follow_speed": False}, None, False, False),
        ("plan.json", GIVEN, None, False, False),
        ("plan.json", FOLLOWING, None, False, True),
        ("auto", GIVEN, BATCHES, False, False),
        ("auto", GIVEN, None, True, False),
        (None, {}, None, False, False),
        (None, {"follow_speed": True}, None, False, "there is no plan"),
        ("plan.json", {"follow_speed": True}, None, False, "new plans are made from planning=PlanConfig"),
        ("auto", FOLLOWING, BATCHES, False, "leave follow_speed or batches"),
        ("auto", FOLLOWING, None, True, "leave follow_speed or elastic out"),
        ("auto", GIVEN | {"drift_threshold": math.inf}, None, False, False),
        ("auto", FOLLOWING | {"drift_threshold": math.inf}, None, False, "stages are not timed"),
    ],
)
def test_which_plans_follow_speeds(plan: Any, planning: Any, batches: Any, is_elastic: bool, expected: Any) -> None:
    arguments = dict(plan=plan, batches=batches)
    if isinstance(expected, bool):
        assert follows(PlanConfig(**planning), arguments, is_elastic) is expected
        return
    with pytest.raises(ValueError, match=f"follow_speed=True is not possible: .*{expected}"):
        follows(PlanConfig(**planning), arguments, is_elastic)


# Groups --------------------------------------------------------------------------------------------------------------


@on(1)
def if_an_interface_does_not_exist_the_error_names_it() -> None:
    with pytest.raises(RuntimeError, match="nowhere9"):
        make_group([0], Network("gloo", "Ethernet"), adapters={"Ethernet": Adapter(interface="nowhere9")})
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs torch with NCCL")
def test_options_for_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a group is made, ``NCCL_NET`` names its network. Its options keep the name for later communicators."""
    monkeypatch.setenv("NCCL_NET", "other")
    seen = []

    def new_group(ranks: list[int], **arguments: Any) -> Any:
        seen.append((ranks, os.environ.get("NCCL_NET"), arguments))
        return dist.GroupMember.NON_GROUP_MEMBER

    for network in (Network("nccl", "RoCE", "IB"), Network("nccl", "Ethernet", "Socket"), Network("nccl", "NVLink")):
        make_group((0, 1), network, new_group=new_group)
    assert [(ranks, net) for ranks, net, _ in seen] == [([0, 1], "IB"), ([0, 1], "Socket"), ([0, 1], "other")]
    assert [arguments["backend"] for *_, arguments in seen] == ["nccl"] * 3
    assert [arguments["pg_options"].config.net_name for *_, arguments in seen[:2]] == ["IB", "Socket"]
    assert "pg_options" not in seen[2][2] and os.environ["NCCL_NET"] == "other"


IN_NODES = make_plan([[[3], [2]], [[1], [0]]], (1, 3))  # A plan in which each replica is in one node


def two_nodes(kinds: tuple[str, str] = ("Ethernet", "Ethernet"), device: str = "cpu", size: int = 2) -> Topology:
    inside, devices = Channel("PCIe", 1e10), [DeviceKind(device, 10**9, 1e9)] * size
    return of_nodes((devices, inside, (Channel(nic, 1e8),)) for nic in kinds)


def check_interfaces(
    plan: Plan, topology: Topology, expected: dict[tuple[int, ...], str | None], trains: bool = False
) -> None:
    made: dict[tuple[int, ...], str | None] = {}

    def recorded(ranks: Sequence[int], **options: Any) -> Any:
        made[tuple(ranks)] = os.environ.get("GLOO_SOCKET_IFNAME")
        return ordered_group(ranks, **options)

    planning = PlanConfig(cluster=topology, adapters={"Ethernet": Adapter(interface="lo")})
    with patch.object(groups, "ordered_group", recorded):
        run = boost(planned(plan, planning=planning), tiny_vit(depth=plan.blocks), sgd)
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    assert os.environ.pop("NCCL_SOCKET_IFNAME") == "=lo"  # NCCL reads its variable once per process, so it stays set
    assert {ranks: name for ranks, name in made.items() if len(ranks) > 1} == expected, plan.rank_order
    if trains:
        assert dist.get_backend(run.plugin.dp_group) == "gloo"
        assert train_planned(run) == pytest.approx(train_alone(plan.blocks, plan.global_batch)[0], rel=1e-5)


@on(4)
def groups_communicate_over_the_network_between_their_members() -> None:
    # The replica of rank 0 comes first.
    inside: dict[tuple[int, ...], str | None] = {(3, 2): None, (1, 0): None}
    across: dict[tuple[int, ...], str | None] = {(1, 3): "lo", (0, 2): "lo"}
    check_interfaces(IN_NODES, two_nodes(), across | inside, trains=True)
    check_interfaces(IN_NODES, two_nodes(device="A100-40"), across | inside)  # planned for GPUs
    # The nodes share no network, so none is chosen. Torch finds a connection or raises an error.
    check_interfaces(IN_NODES, two_nodes(("InfiniBand", "RoCE")), dict.fromkeys(across) | inside)
    # A plan that uses the first device of one node and all three of the other, so rank 1 is on device 3.
    some_devices = make_plan([[[5], [4]], [[3], [0]]], (1, 3))
    check_interfaces(some_devices, two_nodes(size=3), {(1, 3): None, (0, 2): "lo", (3, 2): None, (1, 0): "lo"})
    with pytest.raises(ValueError, match=r"the plan has device 5, but the cluster has devices 0 to 3"):
        planned(make_plan([[[0], [1]], [[2], [5]]], (1, 3)), planning=PlanConfig(cluster=two_nodes()))


@on(3)
def layers_of_unequal_replicas_are_summed_over_the_networks_of_the_plan() -> None:
    plan = unequal_plan(make_plan([[[0]]], [4], 2, 3), make_plan([[[2], [3]]], [1, 3], 2, 2))
    # The pipeline inside a node, the first block, the other blocks.
    check_interfaces(plan, two_nodes(), {(1, 2): None, (0, 1): "lo", (0, 2): "lo"})
