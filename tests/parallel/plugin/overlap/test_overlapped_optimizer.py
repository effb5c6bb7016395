"""Overlapped ZeRO trains to the same weights as ZeRO without overlap, nobody reads unfinished parameters, and as many
bytes leave a rank in a synchronization as the planner assumes."""

import copy
import functools
import io
import itertools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import psutil
import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from colossal_hetero.planner.batches.batch_profile import PASSES
from colossal_hetero.plugin.zero import late_parameters
from colossal_hetero.plugin.zero.late_parameters import LateParameter
from colossal_hetero.plugin.zero.overlapped_optimizer import OverlappedZeroOptimizer
from tests.support import training
from tests.support.checks import on, with_colossalai_passes
from tests.support.language_models import gpt2, tokens
from tests.support.planning import ZERO_BUBBLE
from tests.support.training import assert_same_parameters, boost, make_step, ours, pipeline_step, sgd, theirs, tiny_vit
from tests.support.zero_runs import boosted, fit, unmeasured

ON = dict(overlap_communication=True, overlap_allgather=True)
OFF = dict(overlap_communication=False, overlap_allgather=False)
BUCKET = 150  # elements; some parameters of the model are larger and some are smaller


class Net(nn.Module):
    """A model with parameters that are unused, frozen, used by another module than their own, or used now and then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(7))
        self.first = nn.Linear(7, 14)
        self.unused = nn.Linear(3, 5)
        self.attention = nn.MultiheadAttention(14, 2, batch_first=True)
        self.frozen = nn.Linear(14, 14)
        self.frozen.requires_grad_(False)
        self.now_and_then = nn.Parameter(torch.full((13,), 0.1))
        self.norm = nn.LayerNorm(14)
        self.second = nn.Linear(14, 7)
        self.third = nn.Linear(7, 3)
        self.uses_all = True
        self.repeats = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs[:, :7] * self.scale)
        hidden = hidden + self.attention(hidden[:, None], hidden[:, None], hidden[:, None])[0][:, 0]
        hidden = self.norm(nn.functional.gelu(self.frozen(hidden)))
        for _ in range(self.repeats):
            hidden = checkpoint(self.norm, hidden, use_reentrant=True)  # its parameters get a gradient each time
        if self.uses_all:
            hidden = hidden + self.now_and_then.square().sum()
        return self.third(self.second(hidden) @ self.first.weight.t()[:, :7])


@contextmanager
def finished_late() -> Iterator[None]:
    """A rank gets the result of an asynchronous gather when it waits for it, and not before."""
    gather = dist.all_gather_into_tensor

    def gather_late(output: Tensor, input: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if not async_op:
            return gather(output, input, group=group)
        result = torch.empty_like(output)
        work = gather(result, input.clone(), group=group, async_op=True)
        return SimpleNamespace(wait=lambda: (work.wait(), output.copy_(result)))

    with patch.object(dist, "all_gather_into_tensor", gather_late), patch.object(late_parameters, "SMALL", 40):
        yield


def boosted_net(stage: int, optimizer_name: str, division: list[list[int]], **options: Any) -> tuple[Any, ...]:
    # Batches are not divided again: what a rank uses of the model follows from the division.
    fixed: dict[str, Any] = dict(max_micro_batch=8, reallocate_above=math.inf, reduce_bucket_size_in_m=BUCKET / 2**20)
    fixed |= dict(samples=11, loader=dict(shuffle=True, seed=11), division=division)
    return boosted(stage, Net(), optimizer_name, **fixed, **options)[2:6]


def train(
    stage: int, optimizer_name: str, division: list[list[int]], epochs: int = 2, repeats: int = 0, **options: Any
) -> dict[str, Tensor]:
    model, optimizer, criterion, loader = boosted_net(stage, optimizer_name, division, **options)
    net = model.unwrap()
    net.repeats = repeats
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for inputs, targets in loader:
            # In stage 1, gradients are summed over ranks once per global batch. So every rank may use a parameter in
            # another micro-batch; here all but rank 0 use it only in the first one.
            net.uses_all = stage == 2 or dist.get_rank() == 0 or loader.current.step == 0
            make_step(optimizer, criterion(model(inputs), targets))
    return {name: parameter.detach().clone() for name, parameter in net.named_parameters()}


TWO = [[4, 3], [2, 2]]
THREE = [[2, 1], [3, 0], [1, 4]]
CASES: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    2: [
        ((1, "sgd", TWO), dict(epochs=3)),
        ((2, "adamw", TWO), dict(max_norm=0.2)),
        ((1, "adamw", [[5], [6]]), dict(precision="bf16")),
        ((1, "sgd", [[5], [6]]), dict(repeats=2)),
    ],
    3: [((1, "adamw", THREE), dict(max_norm=0.2, epochs=3)), ((2, "sgd", THREE), {})],
}


@on(2)
@on(3)
@unmeasured
def training_equals_that_without_overlap() -> None:
    for number, (case, options) in enumerate(CASES[dist.get_world_size()]):
        with finished_late():
            overlapped = train(*case, **options, **ON)
        expected = train(*case, **options, **OFF)
        if number == 0 and dist.get_world_size() == 2:
            assert_same_parameters(overlapped, expected, str(case))
        # Three ranks are summed, and norms are computed, in another order.
        torch.testing.assert_close(overlapped, expected, rtol=1e-3, atol=1e-5, msg=str(case))


@on(2)
@unmeasured
def communication_starts_in_the_backward_pass_and_ends_in_the_next_forward_pass() -> None:
    model, optimizer, criterion, loader = boosted_net(1, "sgd", [[5], [6]], **ON)
    net, events = model.unwrap(), []
    reduce_scatter = dist.reduce_scatter_tensor

    @functools.wraps(reduce_scatter)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        events.append("sum")
        return reduce_scatter(*args, **kwargs)

    for layer, name in ((net.first, "first layer"), (net.third, "last layer")):

        def note(_: Tensor, name: str = name) -> None:
            events.append(name)

        note.is_linear = True  # type: ignore[attr-defined]
        layer.weight.register_hook(note)

    def late() -> list[bool]:
        return [isinstance(layer.weight, LateParameter) for layer in (net.first, net.third)]

    after_step, in_forward = [], list[bool]()
    with patch.object(dist, "reduce_scatter_tensor", recorded), finished_late():
        for number, (inputs, targets) in enumerate(loader):
            if number == 1:
                hook = net.first.register_forward_hook(lambda *_: in_forward.extend(late()))
            loss = criterion(model(inputs), targets)
            events.clear()
            optimizer.backward(loss)
            if number == 1:
                hook.remove()
                break
            make_step(optimizer)
            after_step = late()
    assert events.index("last layer") < events.index("sum") < events.index("first layer")
    assert events[-1] == "sum" and after_step == [True, True] and in_forward == [False, True]


READERS = ["state_dict", "evaluation", "shared", "copied", "pickled", "stepped", "saved", "assigned"]


@on(2)
@unmeasured
def nobody_reads_unfinished_parameters(folder: Path) -> None:
    model, optimizer, criterion, loader = boosted_net(1, "sgd", [[5], [6]], **ON)
    net = model.unwrap()
    second = nn.Linear(7, 14)
    second.weight, second.bias = net.first.weight, net.first.bias
    path = folder / "model.pt"

    def read(reader: str, inputs: Tensor) -> Tensor:
        if reader == "state_dict":
            return net.state_dict()["first.weight"].clone()
        if reader == "evaluation":
            with torch.no_grad():
                model.eval()(inputs)
            model.train()
            return net.first.weight.detach().clone()
        if reader == "shared":
            return second(torch.eye(7)).detach().t() - second.bias.detach()[:, None]
        if reader == "copied":
            return copy.deepcopy(net).first.weight.detach()
        if reader == "pickled":
            buffer = io.BytesIO()
            torch.save(net.first, buffer)
            buffer.seek(0)
            return torch.load(buffer, weights_only=False).weight.detach()
        if reader == "stepped":
            type(optimizer).step(optimizer)
            return net.first.weight.detach().clone()
        if reader == "saved":
            Booster(plugin=training.zero_plugin(1, 11)).save_model(model, str(path))
            dist.barrier()
            return torch.load(path, weights_only=True)["first.weight"]
        # The gather does not overwrite what is written.
        with torch.no_grad():
            net.first.weight.fill_(2.0)
        return torch.full((14, 7), 2.0)

    batches = (batch for epoch in range(3) for batch in loader)
    with finished_late():
        for reader in READERS:
            inputs, targets = next(batches)
            make_step(optimizer, criterion(model(inputs), targets))
            assert isinstance(net.first.weight, LateParameter), reader
            value = read(reader, inputs).detach()
            # Only rank 0 reads what it saves.
            assert type(net.first.weight) is nn.Parameter or (reader == "saved" and dist.get_rank() > 0), reader
            optimizer._force_wait_all_gather()
            torch.testing.assert_close(value, net.first.weight.detach(), rtol=1e-6, atol=1e-6, msg=reader)


@on(2)
@unmeasured
def late_parameters_of_compiled_models_are_refused() -> None:
    words = r"^{} is compiled.* use one of overlap_allgather=True and torch\.compile$"
    for compiled, name in (("whole", "Net"), ("layer", "Linear"), ("wrapped", "OptimizedModule")):
        model, optimizer, _, loader = boosted_net(1, "sgd", [[5], [6]], **ON)
        net = model.unwrap()
        if compiled == "whole":
            net.compile(backend="eager")
        elif compiled == "layer":
            net.second.compile(backend="eager")
        else:
            model = torch.compile(model, backend="eager")
        with finished_late(), pytest.raises(ValueError, match=words.format(name)):
            fit(model, optimizer, loader)
        optimizer._force_wait_all_gather()


# The hybrid plugin --------------------------------------------------------------------------------------------------


HYBRID: dict[int, list[tuple[dict[str, Any], int]]] = {
    2: [(dict(tp_size=1), 2), (dict(tp_size=1, max_norm=0.5), 1)],
    4: [
        (dict(tp_size=1, pp_size=2, num_microbatches=2), 1),
        (dict(tp_size=1, pp_size=2, num_microbatches=2, pp_style="interleaved", num_model_chunks=2), 1),
        (dict(tp_size=1, pp_size=2, **ZERO_BUBBLE), 1),
        (dict(tp_size=2), 2),
    ],
}
"""By number of ranks: arguments of the hybrid plugin, and batches per step. In each case there are two replicas."""


@on(2)
@on(4)
def the_hybrid_plugin_trains_to_the_weights_of_colossal_ai() -> None:
    """A pipeline has started to sum gradients before its passes end, except in the zero-bubble schedule."""
    sync_grad, started = OverlappedZeroOptimizer._sync_grad, []

    def recorded(optimizer: OverlappedZeroOptimizer) -> None:
        started.append(optimizer.sums.started)
        sync_grad(optimizer)

    for options, accumulation in HYBRID[dist.get_world_size()]:
        common = options | MANY | dict(precision="bf16", zero_stage=1)

        def trained(plugin: Any, accumulation: int = accumulation) -> dict[str, Tensor]:
            return training.train(boost(plugin, tiny_vit(depth=4), sgd), 3, accumulation).parameters

        started.clear()
        with finished_late(), patch.object(OverlappedZeroOptimizer, "_sync_grad", recorded):
            overlapped = trained(ours(**common, **ON))
        assert len(started) == (3 if "pp_size" in options else 0), options
        assert all((launched > 0) == (options.get("pp_style") != "zbv") for launched in started), (options, started)
        assert_same_parameters(overlapped, trained(theirs(**common, **OFF)), str(options))


MANY = dict(zero_bucket_size_in_m=500 / 2**20)
SEQUENCE = dict(
    enable_sequence_parallelism=True, sequence_parallelism_mode="split_gather", make_vocab_size_divisible_by=4
)


@with_colossalai_passes(4)
def a_pipeline_with_sequence_parallelism_sums_gradients_after_its_passes() -> None:
    common = dict(tp_size=2, pp_size=2, num_microbatches=2, precision="bf16", zero_stage=1, **MANY, **SEQUENCE)
    found = []
    for plugin in (ours(**common, **ON), theirs(custom_policy=None, **common, **OFF)):
        run = boost(plugin, gpt2(), sgd)
        for step in range(2):
            ids, labels = (torch.cat([each, each]) for each in tokens(step))
            batch = dict(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))
            pipeline_step(run, iter([batch]), lambda outputs, _: outputs["loss"])
        found.append(run.parameters)
    assert_same_parameters(*found, "sequence parallelism")


def train_accumulating(plugin: Any, first_is_summed: bool) -> list[Tensor]:
    run = boost(plugin, gpt2(), sgd)
    for step in range(2):
        for part in range(2):
            ids, labels = tokens(2 * step + part)
            sums = part == 1 or first_is_summed
            with nullcontext() if sums else run.booster.no_sync(run.model, run.optimizer):
                loss = run.model(input_ids=ids, labels=labels, attention_mask=torch.ones_like(ids))["loss"]
                run.booster.backward(loss, run.optimizer)
        make_step(run.optimizer)
    return list(run.parameters.values())


@with_colossalai_passes(2)
def parts_of_sequences_are_summed_once_for_several_backward_passes() -> None:
    common = dict(tp_size=2, precision="fp32", **SEQUENCE)
    expected = train_accumulating(theirs(custom_policy=None, **common), first_is_summed=False)
    for stage, sums in ((1, False), (1, True), (2, True)):
        values = train_accumulating(ours(**common, **MANY, zero_stage=stage), sums)
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


@on(2)
def with_zero_each_optimizer_needs_its_own_backward_pass() -> None:
    model = tiny_vit()
    parameters = list(model.parameters())
    booster = Booster(plugin=ours(tp_size=1, precision="fp32", zero_stage=1))
    first, second = (torch.optim.SGD(part, lr=0.1) for part in (parameters[::2], parameters[1::2]))
    model, first, *_ = booster.boost(model, first)
    _, second, *_ = booster.boost(model, second)
    for backward in (lambda loss: booster.backward(loss, first), lambda loss: loss.backward()):
        backward(model(torch.randn(2, 3, 8, 8)).sum())
        with pytest.raises(RuntimeError, match=r"in another pass: call booster\.backward\(loss, optimizer\) with the"):
            second.step()
        first.zero_grad()
        second.zero_grad()


@on(2)
@unmeasured
def whole_gradients_are_released_while_others_are_summed() -> None:
    """How many whole gradients are in memory when a sum starts, in a backward pass of ZeRO stage 2 with many sums."""
    model, optimizer, criterion, loader = boosted_net(2, "sgd", [[5], [6]], **OFF)
    alive: list[Any] = []
    counts = []
    reduce_scatter = dist.reduce_scatter_tensor

    def recorded(output: Tensor, sent: Tensor, *args: Any, **kwargs: Any) -> Any:
        alive.append(weakref.ref(sent))
        counts.append(sum(each() is not None for each in alive))
        return reduce_scatter(output, sent, *args, **kwargs)

    inputs, targets = next(iter(loader))
    with patch.object(dist, "reduce_scatter_tensor", recorded):
        optimizer.backward(criterion(model(inputs), targets))
    assert len(counts) >= 4 and max(counts) <= 3


# Bytes --------------------------------------------------------------------------------------------------------------


WIDTH = 300


def sent_bytes() -> int:
    """Bytes that this process has written into files and connections, as Gloo writes its messages."""
    return psutil.Process().io_counters().write_chars


WRAPPED = dict(auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
SENT: list[tuple[int, dict[str, Any], float, float]] = [
    (0, {}, PASSES[0], 0),
    (1, {}, PASSES[1], 1),
    (1, dict(overlap_communication=False), PASSES[1], 1),
    (2, {}, PASSES[2], 1),
    (3, WRAPPED, PASSES[3], 0),
    (3, {}, 2, 0),
]
"""Stage, options of the plugin, and how often the bytes cross the network in the passes and in the step."""


@on(2)
@unmeasured
def synchronization_sends_as_much_as_the_planner_assumes() -> None:
    for stage, options, *expected in SENT:
        torch.manual_seed(3)
        model, samples = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), 12
        data = TensorDataset(torch.randn(samples, WIDTH), torch.arange(samples))
        fixed: dict[str, Any] = dict(samples=4, max_micro_batch=2, division=[[2], [2]])
        _, _, model, optimizer, criterion, loader, _ = boosted(stage, model, "sgd", data, **fixed, **options)
        for inputs, targets in loader:
            optimizer.zero_grad()
            dist.barrier()
            counts = [sent_bytes()]
            optimizer.backward(criterion(model(inputs), targets))
            counts.append(sent_bytes())
            optimizer.step()
            counts.append(sent_bytes())
        message = 3 * WIDTH * (WIDTH + 1) * 4 / 2  # half of the model's bytes
        sent = [(after - before) / message for before, after in itertools.pairwise(counts)]
        assert sent == pytest.approx(expected, rel=0.01, abs=0.01), (stage, options)
