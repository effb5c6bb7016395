"""The seven layers compared with Colossal-AI's, also while columns migrate, and resized ones with masked products."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from colossal_hetero.balance.divide import divide
from colossal_hetero.layers import HeteroLinear1D_Col, Workload
from colossal_hetero.layers.column_migration import COLUMN_EXCHANGES, ColumnMigration
from colossal_hetero.layers.policy import HETERO_LAYERS
from colossal_hetero.layers.transport import Transport
from tests.support.checks import on
from tests.support.language_models import plan_of
from tests.support.migration_runs import relative_difference
from tests.support.random_examples import IS_THOROUGH

IN, OUT = 24, 36  # divisible by 2, 3 and 4; not powers of two
KINDS = {theirs.__name__: (ours, theirs) for theirs, ours in HETERO_LAYERS.items()}
OPTIONS: dict[str, dict[str, Any]] = {
    "FusedLinear1D_Col": {"split_sizes": [OUT // 3] * 3},
    "GPT2FusedLinearConv1D_Col": {"split_sizes": [OUT // 3] * 3},
    "FusedLinear1D_Row": {"split_sizes": [IN // 2] * 2},
    "VocabParallelLMHead1D": {"make_vocab_size_divisible_by": 1},
}


def is_column(kind: str) -> bool:
    return not kind.endswith("Row")


def native(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    module = Conv1D(OUT, IN) if kind.startswith("GPT2") else nn.Linear(IN, OUT)
    module.bias.data.uniform_(-1, 1)
    return module.to(dtype)


def build(cls: type, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    options = OPTIONS.get(kind, {}) | more
    return cls.from_native_module(native(kind, dtype), process_group=dist.group.WORLD, **options)


def owned(kind: str, rank: int) -> Tensor:
    """Indices of the outputs (column-parallel) or inputs (row-parallel) of ``rank``: its share of each fused part."""
    sizes = OPTIONS.get(kind, {}).get("split_sizes", [OUT if is_column(kind) else IN])
    parts = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([part.chunk(dist.get_world_size())[rank] for part in parts])


def inputs(kind: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The whole input, this rank's part of it, the whole gradient of the output, and this rank's part of that."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, IN, generator=generator).to(dtype)
    dy = torch.randn(2, 5, OUT, generator=generator).to(dtype)
    mine = owned(kind, dist.get_rank())
    if is_column(kind):
        return x, x, dy, dy[..., mine].contiguous()
    return x, x[..., mine].contiguous(), dy, dy


class CountingClock:
    def __init__(self) -> None:
        self.marks: list[str] = []

    def mark(self, part: str, kind: int | None = None, inner: bool = False) -> None:
        self.marks.append(part)


def run(layer: Any, kind: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    _, x, _, dy = inputs(kind, seed, dtype)
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad.clone(), "db": layer.bias.grad.clone()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], what: str, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


@on(2)
@on(3)
def without_a_workload_a_layer_is_bit_for_bit_colossalais() -> None:
    for (kind, (our_class, their_class)), dtype in product(KINDS.items(), (torch.float32, torch.bfloat16, torch.half)):
        our = build(our_class, kind, dtype)
        assert type(our) is our_class
        expected = run(build(their_class, kind, dtype), kind, dtype=dtype)

        def check(what: str, our: Any = our, kind: str = kind, dtype: Any = dtype, expected: Any = expected) -> None:
            assert_equal(run(our, kind, dtype=dtype), expected, f"{kind} {dtype} {what}")

        check("without a workload")
        our.clock = CountingClock()
        check("with a clock")
        assert {"matmul", "communication"} <= set(our.clock.marks)
        our.assign(Workload(prune=0.0, select=lambda x, weight, count: torch.arange(0)))
        check("with nothing to prune")
        our.slow_down = lambda product: (product(), product())[1]
        check("with repeated products")


@on(2)
def parameters_and_state_dict_are_those_of_the_native_layer() -> None:
    for kind, (our_class, their_class) in KINDS.items():
        module = native(kind)
        weight, bias = module.weight, module.bias
        options = OPTIONS.get(kind, {})
        layer = our_class.from_native_module(module, process_group=dist.group.WORLD, **options)
        assert layer.weight is weight and layer.bias is bias, kind
        state = layer.state_dict()
        assert list(state) == list(build(their_class, kind).state_dict())
        for name, value in native(kind).state_dict().items():
            assert torch.equal(state[name], value), f"{kind} {name}: state_dict is not the native layer's"
        other = build(our_class, kind)
        other.weight.data.zero_()
        other.load_state_dict(native(kind).state_dict())
        assert torch.equal(other.weight, layer.weight), kind
        if not kind.startswith("Vocab"):  # Colossal-AI's constructor needs a weight
            made = our_class(IN, OUT, process_group=dist.group.WORLD, **options)
            bias = made.bias.detach().clone()
            dist.broadcast(bias, src=0)
            assert is_column(kind) or torch.equal(bias, made.bias), f"{kind}: ranks have different biases"
            assert torch.isfinite(made.weight).all() and made.weight.std() > 0


def kept_columns(kind: str, rank: int, seed: int) -> Tensor:
    columns = IN if is_column(kind) else IN // dist.get_world_size()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randperm(columns, generator=generator)[: columns - columns // 3].sort().values


def reference(kind: str, slow: set[int], imputation: str, seed: int, before: dict[int, dict[str, Tensor]]) -> Any:
    """y, dx, dw and db of every rank, computed from the whole matrices with pruned columns set to zero."""
    module, column = native(kind), is_column(kind)
    weight = module.weight.detach().t() if kind.startswith("GPT2") else module.weight.detach()
    x, _, dy, _ = inputs(kind, seed)
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    partial: dict[int, dict[str, Tensor]] = {}
    for rank in range(dist.get_world_size()):
        mine = owned(kind, rank)
        w_r, x_r, dy_r = (weight[mine], x, dy[:, mine]) if column else (weight[:, mine], x[:, mine], dy)
        mask = torch.zeros(w_r.shape[1])
        mask[kept_columns(kind, rank, seed) if rank in slow else slice(None)] = 1
        found = {"dx_local": (dy_r @ w_r) * mask, "dw": (dy_r.t() @ x_r) * mask}
        for name, value in found.items():
            if rank in slow and imputation == "average":
                found[name] = value + (1 - mask) * (value.sum(1, keepdim=True) / mask.sum())
            if rank in slow and imputation == "same" and rank in before:
                found[name] = value + (1 - mask) * before[rank][name]
        partial[rank] = found | {"y": (x_r * mask) @ w_r.t(), "db": dy_r.sum(0)}
    outputs, gradients = (sum(each[name] for each in partial.values()) for name in ("y", "dx_local"))
    for rank, values in partial.items():
        values["y"] = (
            values["y"] + module.bias.detach()[owned(kind, rank)] if column else outputs + module.bias.detach()
        )
        values["dx"] = gradients if column else values["dx_local"]
    return partial


@on(2)
@on(3)
def a_resized_layer_equals_a_dense_layer_with_masked_columns() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    slow_ranks = [{r} for r in range(world)] + [set(range(world))]
    for number, (kind, imputation) in enumerate(product(KINDS, ("zero", "average", "same"))):
        for slow in slow_ranks if world == 2 or IS_THOROUGH else (slow_ranks[number % len(slow_ranks)],):
            layer, current, before = build(KINDS[kind][0], kind), list[Tensor](), {}
            if rank in slow:
                select = lambda x, weight, count, current=current: current[-1]  # noqa: E731
                layer.assign(Workload(prune=1 / 3, select=select, imputation=imputation))
            # "same" adds what the previous iteration computed.
            for seed in range(3 if imputation == "same" else 2):
                current.append(kept_columns(kind, rank, seed))
                layer.begin_iteration()
                before = reference(kind, slow, imputation, seed, before)
                actual = run(layer, kind, seed)
                actual |= {name: actual[name].flatten(0, 1) for name in ("y", "dx")}
                if kind.startswith("GPT2"):
                    actual["dw"] = actual["dw"].t()
                expected = {name: before[rank][name] for name in actual}
                assert_equal(actual, expected, f"{kind} {imputation} slow={slow} iteration {seed}", 2e-5)


@on(2)
def micro_batches_of_an_iteration_share_their_columns_and_other_passes_prune_nothing() -> None:
    for kind, (our_class, their_class) in KINDS.items():
        layer, their = build(our_class, kind), build(their_class, kind)
        generator, chosen = torch.Generator().manual_seed(dist.get_rank()), list[Tensor]()

        def select(x: Tensor, weight: Tensor, count: int, chosen: Any = chosen, generator: Any = generator) -> Tensor:
            chosen.append(torch.randperm(weight.shape[1], generator=generator)[:count].sort().values)
            return chosen[-1]

        layer.assign(Workload(prune=0.5, select=select))
        gradients = [run(layer, kind, seed)["dw"] for seed in (0, 1)]
        (kept,) = chosen  # the second micro-batch uses the columns of the first
        pruned = torch.ones(layer.contraction_columns, dtype=torch.bool).index_fill_(0, kept, False)
        for gradient in gradients:
            columns = gradient.t() if kind.startswith("GPT2") else gradient
            assert (columns[:, pruned] == 0).all() and (columns[:, kept] != 0).any(0).all(), kind
        layer.begin_iteration()
        run(layer, kind)
        assert len(chosen) == 2 and not torch.equal(chosen[1], kept), f"{kind}: no other columns in a new iteration"
        x = inputs(kind, 0)[1]
        with torch.no_grad():
            assert torch.equal(layer(x), their(x)), f"{kind}: pruned under no_grad"
        layer.eval()
        assert torch.equal(layer(x), their(x)), f"{kind}: pruned in eval mode"
        layer.train()
        assert not torch.equal(layer(x), their(x)), f"{kind}: the workload had no effect"
        layer.assign(None)
        assert torch.equal(layer(x), their(x)), f"{kind}: pruned after the workload was removed"


@on(2)
def resizing_is_refused_with_options_that_exclude_it() -> None:
    for name, value in {"seq_parallel_mode": "split_gather", "use_zbv": True, "fp8_communication": True}.items():
        layer, their = (build(cls, "Linear1D_Col", **{name: value}) for cls in KINDS["Linear1D_Col"])
        with pytest.raises(ValueError, match=name):
            layer.assign(Workload(prune=0.5, select=lambda x, weight, count: torch.arange(count)))
        layer.clock = CountingClock()
        if name != "fp8_communication":  # Colossal-AI's fp8 conversion needs a GPU
            x = inputs("Linear1D_Col", 0)[0]
            with torch.no_grad():
                assert torch.equal(layer(x), their(x)), name
    assert type(layer) is HeteroLinear1D_Col


def train_layer(layer: Any, kind: str, options: dict[str, Any]) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3, momentum=0.9)
    for step in range(2):
        whole, x, whole_dy, dy = inputs(kind, seed=step)
        x = (whole if "parallel_input" in options else x).clone().requires_grad_()
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        optimizer.zero_grad()
        y.backward(whole_dy if "gather_output" in options else dy)
        optimizer.step()
        if hasattr(layer, "begin_iteration"):
            layer.begin_iteration()
    return {"y": y.detach(), "dx": x.grad} | {name: value.detach().clone() for name, value in layer.named_parameters()}


@on(2)
@on(3)
def options_of_each_kind_of_layer_are_those_of_colossalais() -> None:
    ranks, transport = dist.get_world_size(), Transport(dist.new_group())
    for number, (kind, (our_class, their_class)) in enumerate(KINDS.items()):
        exchange = list(COLUMN_EXCHANGES.values())[number % len(COLUMN_EXCHANGES)]
        own_option = {"gather_output": True} if is_column(kind) else {"parallel_input": False}
        for options in ({"skip_bias_add": True}, own_option):
            expected = train_layer(build(their_class, kind, **options), kind, options)
            layer, plan = build(our_class, kind, **options), plan_of(number % ranks, ranks, 0.6)
            layer.assign(None, ColumnMigration(exchange(transport), divide(layer.contraction_columns, plan).moves))
            assert relative_difference(train_layer(layer, kind, options), expected) <= 1e-5, f"{kind} {options}"
