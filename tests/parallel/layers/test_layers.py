"""The seven layers compared with Colossal-AI's (without a workload) and with masked dense products (resized)."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.shardformer import layer as theirs
from torch import Tensor, nn

import colossal_hetero.layers as ours
from tests.support.checks import Checks
from tests.support.parallel_layers import IN, KINDS, OUT, build, inputs, native, options, owned
from tests.support.random_examples import IS_THOROUGH

checks = Checks()


class CountingClock:
    def __init__(self) -> None:
        self.marks: list[str] = []

    def mark(self, part: str, kind: int | None = None, inner: bool = False) -> None:
        self.marks.append(part)


def run(layer: nn.Module, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    _, x, dy = inputs(kind, rank, world, seed, dtype)
    x = x.clone().requires_grad_()
    if kind.endswith("Col"):
        dy = dy[..., owned(kind, rank, world)].contiguous()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad.clone(), "db": layer.bias.grad.clone()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str, exact: bool) -> None:
    for name in expected:
        if exact:
            assert torch.equal(actual[name], expected[name]), f"{what}: {name} differs bitwise"
        else:
            torch.testing.assert_close(
                actual[name], expected[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{what}: {n}: {m}"
            )


# Without a workload --------------------------------------------------------------------------------------------------


@checks.on(2)
@checks.on(3)
def without_a_workload_a_layer_is_bit_for_bit_colossalais() -> None:
    for kind, (our_class, their_class) in KINDS.items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            our, their = build(our_class, kind, dtype), build(their_class, kind, dtype)
            assert type(our) is our_class
            expected = run(their, kind, dtype=dtype)
            assert_equal(run(our, kind, dtype=dtype), expected, f"{kind} {dtype} without a workload", exact=True)
            our.clock = CountingClock()
            assert_equal(run(our, kind, dtype=dtype), expected, f"{kind} {dtype} with a clock", exact=True)
            assert "matmul" in our.clock.marks and "communication" in our.clock.marks
            our.assign(ours.Workload(prune=0.0, select=always_keep(torch.arange(0))))
            assert_equal(run(our, kind, dtype=dtype), expected, f"{kind} {dtype} with nothing to prune", exact=True)
            our.slow_down = lambda product: (product(), product())[1]
            assert_equal(run(our, kind, dtype=dtype), expected, f"{kind} {dtype} with repeated products", exact=True)


@checks.on(2)
def parameters_and_state_dict_are_those_of_the_native_layer() -> None:
    for kind, (our_class, their_class) in KINDS.items():
        module = native(kind)
        weight, bias = module.weight, module.bias
        layer = our_class.from_native_module(module, process_group=dist.group.WORLD, **options(kind))
        assert layer.weight is weight and layer.bias is bias, kind
        their = build(their_class, kind)
        state = layer.state_dict()
        assert list(state) == list(their.state_dict())
        reference = native(kind).state_dict()
        for name in reference:
            assert torch.equal(state[name], reference[name]), f"{kind} {name}: state_dict is not the native layer's"
        other = build(our_class, kind)
        other.weight.data.zero_()
        other.load_state_dict(native(kind).state_dict())
        assert torch.equal(other.weight, layer.weight), kind


@checks.on(2)
def layers_can_be_constructed_without_a_native_module() -> None:
    for kind, (our_class, _) in KINDS.items():
        if kind.startswith("Vocab"):  # Colossal-AI's constructor needs a weight
            continue
        layer = our_class(IN, OUT, process_group=dist.group.WORLD, **options(kind))
        bias = layer.bias.detach().clone()
        if kind.endswith("Row"):
            dist.broadcast(bias, src=0)
            assert torch.equal(bias, layer.bias), f"{kind}: ranks have different biases"
        assert torch.isfinite(layer.weight).all() and layer.weight.std() > 0


# Resized ---------------------------------------------------------------------------------------------------------


def always_keep(kept: Tensor) -> Any:
    return lambda x, weight, count: kept


def kept_columns(kind: str, rank: int, world: int, seed: int) -> Tensor:
    columns = IN if kind.endswith("Col") else IN // world
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randperm(columns, generator=generator)[: columns - columns // 3].sort().values


def reference(
    kind: str, slow: set[int], imputation: str, seed: int, before: dict[int, dict[str, Tensor]]
) -> dict[int, dict[str, Tensor]]:
    """y, dx, dw and db of every rank, computed from the whole matrices with pruned columns set to zero."""
    world = dist.get_world_size()
    module = native(kind)
    weight = module.weight.detach().t() if kind.startswith("GPT2") else module.weight.detach()
    x, _, dy = inputs(kind, 0, world, seed)
    x2, dy2 = x.flatten(0, 1), dy.flatten(0, 1)
    partial: dict[int, dict[str, Tensor]] = {}
    for rank in range(world):
        mine = owned(kind, rank, world)
        column = kind.endswith("Col")
        w_r = weight[mine] if column else weight[:, mine]
        x_r = x2 if column else x2[:, mine]
        dy_r = dy2[:, mine] if column else dy2
        mask = torch.zeros(w_r.shape[1])
        mask[kept_columns(kind, rank, world, seed) if rank in slow else slice(None)] = 1
        dx, dw = (dy_r @ w_r) * mask, (dy_r.t() @ x_r) * mask
        if rank in slow and imputation == "average":
            dx = dx + (1 - mask) * (dx.sum(1, keepdim=True) / mask.sum())
            dw = dw + (1 - mask) * (dw.sum(1, keepdim=True) / mask.sum())
        if rank in slow and imputation == "same" and rank in before:
            dx = dx + (1 - mask) * before[rank]["dx_local"]
            dw = dw + (1 - mask) * before[rank]["dw"]
        partial[rank] = {"y": (x_r * mask) @ w_r.t(), "dx_local": dx, "dw": dw, "db": dy_r.sum(0)}
    for rank, values in partial.items():
        mine = owned(kind, rank, world)
        if kind.endswith("Col"):
            values["y"] = values["y"] + module.bias.detach()[mine]
            values["dx"] = sum(p["dx_local"] for p in partial.values())
        else:
            values["dx"] = values["dx_local"]
    if not kind.endswith("Col"):
        total = sum(p["y"] for p in partial.values()) + module.bias.detach()
        for values in partial.values():
            values["y"] = total
    return partial


@checks.on(2)
@checks.on(3)
def a_resized_layer_equals_a_dense_layer_with_masked_columns() -> None:
    """Each rank alone and all ranks prune."""
    rank, world = dist.get_rank(), dist.get_world_size()
    slow_ranks = [{r} for r in range(world)] + [set(range(world))]
    for number, (kind, imputation) in enumerate(product(KINDS, ("zero", "average", "same"))):
        our_class = KINDS[kind][0]
        for slow in slow_ranks if world == 2 or IS_THOROUGH else (slow_ranks[number % len(slow_ranks)],):
            layer = build(our_class, kind)
            current: dict[str, Tensor] = {}

            def select(x: Tensor, weight: Tensor, count: int, current: dict[str, Tensor] = current) -> Tensor:
                return current["kept"]

            if rank in slow:
                layer.assign(ours.Workload(prune=1 / 3, select=select, imputation=imputation))
            before: dict[int, dict[str, Tensor]] = {}
            # "same" adds what the previous iteration computed.
            for seed in range(3 if imputation == "same" else 2):
                current["kept"] = kept_columns(kind, rank, world, seed)
                layer.begin_iteration()
                everyone = reference(kind, slow, imputation, seed, before)
                expected = {k: everyone[rank][k] for k in ("y", "dx", "dw", "db")}
                actual = run(layer, kind, seed)
                actual = {
                    "y": actual["y"].flatten(0, 1),
                    "dx": actual["dx"].flatten(0, 1),
                    "dw": actual["dw"],
                    "db": actual["db"],
                }
                if kind.startswith("GPT2"):
                    actual["dw"] = actual["dw"].t()
                assert_equal(actual, expected, f"{kind} {imputation} slow={slow} iteration {seed}", exact=False)
                before = everyone


# Which forward passes share their columns ----------------------------------------------------------------------------


def choosing_at_random(seed: int) -> Any:
    """A selector that chooses different columns in every call."""
    generator = torch.Generator().manual_seed(seed)
    return lambda x, weight, count: torch.randperm(weight.shape[1], generator=generator)[:count].sort().values


@checks.on(2)
def micro_batches_of_an_iteration_share_their_columns() -> None:
    for kind, (our_class, _) in KINDS.items():
        layer = build(our_class, kind)
        draw, chosen = choosing_at_random(dist.get_rank()), []

        def select(x: Tensor, weight: Tensor, count: int, draw: Any = draw, chosen: list[Tensor] = chosen) -> Tensor:
            chosen.append(draw(x, weight, count))
            return chosen[-1]

        layer.assign(ours.Workload(prune=0.5, select=select))
        first = run(layer, kind, seed=0)["dw"]
        second = run(layer, kind, seed=1)["dw"]
        (kept,) = chosen  # the second micro-batch uses the columns of the first
        pruned = torch.ones(layer.contraction_columns, dtype=torch.bool)
        pruned[kept] = False
        for gradient in (first, second):
            columns = gradient.t() if kind.startswith("GPT2") else gradient
            assert (columns[:, pruned] == 0).all() and (columns[:, kept] != 0).any(0).all(), kind
        layer.begin_iteration()
        run(layer, kind, seed=0)
        assert len(chosen) == 2 and not torch.equal(chosen[1], kept), (
            f"{kind}: a new iteration did not choose other columns"
        )


@checks.on(2)
def a_layer_prunes_only_in_training() -> None:
    for kind, (our_class, their_class) in KINDS.items():
        layer, their = build(our_class, kind), build(their_class, kind)
        layer.assign(ours.Workload(prune=0.5, select=choosing_at_random(0)))
        x = inputs(kind, dist.get_rank(), dist.get_world_size(), 0)[1]
        with torch.no_grad():
            assert torch.equal(layer(x), their(x)), f"{kind}: pruned under no_grad"
        layer.eval()
        assert torch.equal(layer(x), their(x)), f"{kind}: pruned in eval mode"
        layer.train()
        assert not torch.equal(layer(x), their(x)), f"{kind}: the workload had no effect"
        layer.assign(None)
        assert torch.equal(layer(x), their(x)), f"{kind}: pruned after the workload was removed"


# Options that resizing cannot be combined with ---------------------------------------------------------------------


@checks.on(2)
def resizing_is_refused_with_options_that_exclude_it() -> None:
    workload = ours.Workload(prune=0.5, select=choosing_at_random(0))
    for option in ({"seq_parallel_mode": "split_gather"}, {"use_zbv": True}, {"fp8_communication": True}):
        layer = build(ours.HeteroLinear1D_Col, "Linear1D_Col", **option)
        their = build(theirs.Linear1D_Col, "Linear1D_Col", **option)
        name = next(iter(option))
        with pytest.raises(ValueError, match=name):
            layer.assign(workload)
        layer.clock = CountingClock()
        if "fp8_communication" not in option:  # Colossal-AI's fp8 conversion needs a GPU
            x = inputs("Linear1D_Col", 0, 1, 0)[0]
            with torch.no_grad():
                assert torch.equal(layer(x), their(x)), name


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, float("nan")])
def test_a_workload_refuses_ratios_outside_its_range(ratio: float) -> None:
    with pytest.raises(ValueError, match=r"outside \[0, 1\)"):
        ours.Workload(prune=ratio, select=always_keep(torch.arange(1)))


def test_a_workload_refuses_unknown_imputations() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*zero, average, same"):
        ours.Workload(prune=0.5, select=always_keep(torch.arange(1)), imputation="mean")


test_on_ranks = checks.test()
