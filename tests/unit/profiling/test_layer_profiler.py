"""Layers: blocks and their bytes, times on a simulated clock, a model that is not changed, merged degrees."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (imports packages that transformers needs, without their warnings)
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.profiling import layer_memory
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.profiling.merge_ranks import MeasuredLayers, merge_degrees
from colossal_hetero.profiling.model_layers import describe_layers, find_block_row
from colossal_hetero.profiling.progress import Progress
from tests.support.counted_memory import CountedMemory
from tests.support.layer_profiles import layer_times, times_of
from tests.support.simulated_layers import CLASSES, PERIOD, WIDTH, Model, SimulatedClock, SlowSGD, batch, use_clock
from tests.support.snapshots import snapshot


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimulatedClock:
    clock = SimulatedClock()
    use_clock(clock, monkeypatch)
    return clock


def measure(model: nn.Module, clock: SimulatedClock | None = None, **options: Any) -> Any:
    if clock is not None:
        options.setdefault("optimizer", partial(SlowSGD, clock=clock))
    options = {"micro_batches": [2, 3], "min_seconds": 3.0, **options}
    return profile_layers(model, batch(), options.pop("criterion", F.cross_entropy), **options)


def test_layer_times_are_those_of_the_simulated_clock(clock: SimulatedClock) -> None:
    blocks = ((0.003, 0.006),) * 5
    profile = measure(Model(clock, (0.002, 0.005), blocks, (0.004, 0.001)), clock).profile
    assert profile.devices == ("cpu",) and profile.micro_batches("cpu", 1) == (2, 3) and profile.blocks == 5
    for size in (2, 3):
        times = times_of(profile, "cpu", 1, size)
        np.testing.assert_allclose(times.forward_seconds, size * np.array([0.002, *[0.003] * 5, 0.004]))
        np.testing.assert_allclose(times.backward_seconds, size * np.array([0.005, *[0.006] * 5, 0.001]))
        assert times.relative_error < 1e-9
        # The weight and the bias of the linear layer and of the norm.
        np.testing.assert_allclose(times.update_seconds, [4 * SlowSGD.SECONDS] * 7)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quota", [1 / 2, 1 / 4])
def test_a_cpu_quota_slows_layers_by_its_share(monkeypatch: pytest.MonkeyPatch, quota: float, threads: int) -> None:
    clock = SimulatedClock(quota, threads)
    use_clock(clock, monkeypatch)
    seconds = 6.0 if threads == 1 else 20.0
    # All parts together take no multiple of the time between two pauses.
    profile = measure(Model(clock, (0.002, 0.007), after=(0.004, 0.001)), clock, min_seconds=seconds).profile
    times = times_of(profile, "cpu", 1, 2)
    if threads == 2:  # by wall time, which has the pauses
        assert 0.001 < times.relative_error < 0.5
    # The measurement may contain one period more or less; with two threads, each part that shares the time may.
    tolerance = 2 * PERIOD / (seconds if threads == 1 else seconds / 8)
    whole = 2 * sum((0.002, 0.007, *[0.009] * 5, 0.004, 0.001)) / quota
    assert sum(times.forward_seconds) + sum(times.backward_seconds) == pytest.approx(whole, rel=tolerance)
    share = np.array(times.backward_seconds[1:-1]) / np.array(times.forward_seconds[1:-1])
    np.testing.assert_allclose(share, 2.0, rtol=1e-6)
    if threads == 1:
        np.testing.assert_allclose(times.forward_seconds[1:-1], 2 * 0.003 / quota, rtol=tolerance)


class Wide(nn.Module):
    """Slow blocks have more parameters, so they are another kind of block."""

    def __init__(self, clock: SimulatedClock, *seconds: float) -> None:
        super().__init__()
        self.inner = Model(clock, blocks=(seconds,)).blocks[0]
        if seconds[0] > 0.004:
            self.more = nn.Parameter(torch.zeros(100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + (0.0 if not hasattr(self, "more") else self.more.sum())


def test_the_model_is_not_changed() -> None:
    """Also if measuring fails."""
    for precision in ("fp32", "bf16"):
        model = Model(SimulatedClock())
        model.blocks[1].eval()
        model.blocks[2].forward = model.blocks[2].forward  # Colossal-AI replaces methods in this way
        model.head.linear.weight.grad = torch.ones_like(model.head.linear.weight)
        before = snapshot(model)
        measure(model, min_seconds=0.0, precision=precision)
        assert before == snapshot(model)
    before = snapshot(model := Model(SimulatedClock()))

    def fail(*_: Any) -> torch.Tensor:
        raise KeyError("no loss")

    with pytest.raises(KeyError, match="no loss"):
        measure(model, criterion=fail)
    assert before == snapshot(model)


@pytest.mark.parametrize(
    ("optimizer", "precision", "factor"),
    [("sgd", "fp32", 2.0), ("adam", "fp32", 4.0), ("adamw", "fp32", 4.0), ("adam", "bf16", 9.0), ("sgd", "fp16", 5.0)],
)
def test_state_is_counted(optimizer: str, precision: str, factor: float) -> None:
    """Parameters, gradients and, for Adam, two moments; in half precision also copies and gradients in fp32."""
    model = Model(SimulatedClock())
    profile = measure(model, optimizer=optimizer, precision=precision, min_seconds=0.0).profile
    assert profile.state_factor == factor
    assert profile.precision == precision
    bytes_each = 4 if precision == "fp32" else 2
    assert sum(profile.sizes[0].parameter_bytes) == bytes_each * sum(each.numel() for each in model.parameters())


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.relu(self.linear(hidden_states)), None


class Transformed(nn.Module):
    """Calls its blocks with keyword arguments and a shared mask, as models of ``transformers`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Masked() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x, mask = self.embed(x), x.new_ones(len(x), WIDTH)
        for layer in self.layers:
            x = layer(mask=mask, hidden_states=x)[0]
        return Outputs(loss=F.cross_entropy(self.head(x), labels))


class Outputs(dict):
    @property
    def loss(self) -> torch.Tensor:
        return self["loss"]


class Masked(Linear):
    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore
        return torch.relu(self.linear(hidden_states)) * mask, None


def test_activations_are_what_backward_needs() -> None:
    samples = {"x": batch()[0], "labels": batch()[1]}
    profile = profile_layers(Transformed(), samples, micro_batches=[4], min_seconds=0.0).profile
    row = 4 * WIDTH
    # A block keeps its input and the output of relu. The mask does not count, because the model makes it once for all
    # blocks. Before the blocks: the images. After the blocks, per sample: the last hidden state, the log-probabilities,
    # the target (8 bytes), and a quarter of the 4 bytes for the weight of all targets.
    after = row + 4 * CLASSES + 8 + 1
    assert profile.sizes[0].activation_bytes == (row, *[2 * row] * 3, after)
    assert profile.sizes[0].output_bytes == (row, *[row] * 3, 0)


def test_temporaries_are_measured_where_the_allocator_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"x": batch()[0], "labels": batch()[1]}
    allocator = CountedMemory(outside_bytes=5 * 10**8)
    for name in ("used_bytes", "reset_peak", "peak_bytes"):
        monkeypatch.setattr(layer_memory, name, lambda device, name=name: getattr(allocator, name)())
    monkeypatch.setattr(f"{profile_layers.__module__}.counts_bytes", lambda device: True)
    monkeypatch.setattr(f"{profile_layers.__module__}.outside_bytes", lambda device: allocator.outside_bytes())
    with allocator:
        profile = profile_layers(Transformed(), samples, micro_batches=[1, 4], min_seconds=0.0).profile
    assert profile.context_bytes == {"cpu": 5 * 10**8}
    (sizes,) = profile.sizes
    # At the end of a block's backward pass there are per sample its output and the gradients of the output, of what
    # relu returned and of the input, without the relu's output, which was kept. After the blocks there is the gradient
    # of the last hidden state, because that of the logits is as large as the log-probabilities that were kept; before
    # them that of the output. Gradients of weight and bias wait to be added to the earlier ones.
    row = 4 * WIDTH
    assert sizes.temporary_bytes == (row, *[3 * row] * 3, row)
    assert sizes.fixed_temporary_bytes == (*[4 * WIDTH * (WIDTH + 1)] * 4, 4 * CLASSES * (WIDTH + 1))


def test_micro_batches_that_do_not_fit_in_memory_are_left_out(clock: SimulatedClock) -> None:
    class Greedy(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 3:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
            return super().forward(x)

    model = Model(clock, block=Greedy)
    profile = measure(model, clock, micro_batches=[8, 1, 3, 4], min_seconds=0.0).profile
    assert profile.micro_batches("cpu", 1) == (1, 3)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        measure(model, clock, micro_batches=[4, 8])

    # Progress is reported.
    seen: list[Progress] = []
    measure(Model(clock), clock, on_progress=seen.append, min_seconds=0.0)
    sizes = [("measuring micro-batches (1 of 2)", 2), ("measuring micro-batches (2 of 2)", 3)]
    assert list(dict.fromkeys((each.action, each.samples) for each in seen)) == sizes


class Halving(Linear):
    def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[override]
        return hidden_states[..., : hidden_states.shape[-1] // 2]


def halving() -> nn.Module:
    model = Model(SimulatedClock(), block=lambda *_: Halving())
    model.head = nn.Identity()  # type: ignore[assignment]
    return model


HIDDEN, INNER, WORDS, TOKENS, LAYERS = 32, 64, 50, 16, 3
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": WORDS}
WIDE = {**SIZES, "intermediate_size": INNER}
FAMILIES: dict[str, tuple[type, Any]] = {
    "transformer.h": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=2, vocab_size=WORDS),
    ),
    "model.layers": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**WIDE)),
    "bert.encoder.layer": (transformers.BertForSequenceClassification, transformers.BertConfig(**WIDE)),
    "model.decoder.layers": (
        transformers.OPTForCausalLM,
        transformers.OPTConfig(**SIZES, ffn_dim=INNER, word_embed_proj_dim=HIDDEN),
    ),
}


transformers.logging.set_verbosity_error()


def ids() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.zeros(1, TOKENS, dtype=torch.long)}


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_transformers(name: str) -> None:
    kind, config = FAMILIES[name]
    model = kind(config).train()
    random = torch.get_rng_state()
    layers = describe_layers(model, ids())
    assert model.training and torch.equal(torch.get_rng_state(), random)
    assert (layers.row.name, len(layers.row.blocks)) == (name, LAYERS)
    weights = {id(parameter): parameter.numel() for parameter in model.parameters()}
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    assert sum(layers.parameter_bytes) == 4 * (sum(weights.values()) + tied * WORDS * HIDDEN)
    # OPT registers its last norm before its blocks.
    assert any(part in each for each in layers.after for part in ("norm", "ln_f", "pooler")), layers.after
    assert all("embed" in each or "wte" in each or "wpe" in each for each in layers.before)


def t5() -> nn.Module:
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(num_layers=2, d_model=32, d_ff=64, num_heads=2, vocab_size=50)
        )


def test_other_models_have_the_same_blocks() -> None:
    wrapped = nn.ModuleDict({"module": timm.create_model("vit_tiny_patch16_224", depth=2)})
    assert find_block_row(wrapped).name == "module.blocks"
    assert len(find_block_row(t5(), "encoder.block").blocks) == 2


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.parts = nn.ModuleList(timm.layers.Mlp(2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [*self.parts, *self.parts]:
            x = part(x)
        return x


def measured(degree: int, devices: tuple[str, ...], seconds: dict[str, float]) -> tuple[int, MeasuredLayers]:
    times = tuple(layer_times(device, (each,) * 3, tensor_parallel=degree) for device, each in seconds.items())
    ones = (8 // degree,) * 3
    sizes = LayerSizes(tensor_parallel=degree, parameter_bytes=ones, activation_bytes=ones, output_bytes=ones)
    profile = ModelProfile(name="net", rank_devices=devices, times=times, sizes=(sizes,))
    return degree, MeasuredLayers(profile, devices, (100,) * len(devices))


def test_groups_have_the_kind_of_their_members() -> None:
    alone = measured(1, ("cpu", "cpu", "cpu-2", "cpu-2"), {"cpu": 1.0, "cpu-2": 3.0})
    # As groups, the slow ranks are the first ones of their kind.
    pairs = measured(2, ("cpu-2", "cpu-2", "cpu", "cpu"), {"cpu-2": 0.6, "cpu": 1.7})
    merged, remarks = merge_degrees([alone, pairs])
    profile = merged.profile
    assert remarks == () and merged.devices == profile.rank_devices == ("cpu", "cpu", "cpu-2", "cpu-2")
    assert profile.tensor_parallel_degrees("cpu") == profile.tensor_parallel_degrees("cpu-2") == (1, 2)
    assert times_of(profile, "cpu", 1, 1).forward_seconds[0] == 1.0
    assert times_of(profile, "cpu", 2, 1).forward_seconds[0] == 0.6
    assert times_of(profile, "cpu-2", 2, 1).forward_seconds[0] == 1.7
    assert [each.parameter_bytes[0] for each in profile.sizes] == [8, 4]
    # Of several groups of a kind the slowest counts.
    alone = measured(1, ("cpu",) * 4, {"cpu": 1.0})
    for devices in (("cpu", "cpu", "cpu-2", "cpu-2"), ("cpu-2", "cpu-2", "cpu", "cpu")):
        merged, _ = merge_degrees([alone, measured(2, devices, {"cpu": 0.9, "cpu-2": 0.6})])
        assert times_of(merged.profile, "cpu", 2, 1).forward_seconds[0] == 0.9
    # Groups of several kinds are left out.
    alone = measured(1, ("cpu", "cpu-2"), {"cpu": 1.0, "cpu-2": 3.0})
    merged, remarks = merge_degrees([alone, measured(2, ("cpu", "cpu"), {"cpu": 2.0})])
    assert merged == alone[1]
    assert remarks == ("tensor parallel 2: groups of unequal devices are left out: ranks 0 to 1 are cpu and cpu-2",)
