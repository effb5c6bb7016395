"""The blocks are those that Colossal-AI counts; bytes equal the formulas; profiles of several degrees are merged."""

from typing import Any

import pytest
import timm
import torch
import transformers
from torch import nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (imports packages that transformers needs, without their warnings)
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile
from colossal_hetero.profiling.merge_ranks import MeasuredLayers, merge_degrees
from colossal_hetero.profiling.model_layers import describe_layers, find_block_row
from tests.support.layer_profiles import layer_times, times_of

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


def test_gpt2_and_vit_equal_their_formulas() -> None:
    kind, config = FAMILIES["transformer.h"]
    size = [count / 4 for count in describe_layers(kind(config), ids()).parameter_bytes]
    # A block has 12 h² + 13 h parameters, the embedding (V + positions) h, the tied head V h and the last norm 2 h.
    assert size[1:-1] == [12 * HIDDEN**2 + 13 * HIDDEN] * LAYERS
    assert size[0] == (WORDS + config.n_positions) * HIDDEN
    assert size[-1] == WORDS * HIDDEN + 2 * HIDDEN
    layers = describe_layers(timm.create_model("vit_tiny_patch16_224"), torch.zeros(2, 3, 224, 224))
    width, tokens = 192, 197
    assert (layers.row.name, len(layers.row.blocks)) == ("blocks", 12)
    size = [count / 4 for count in layers.parameter_bytes]
    assert size[0] == 16 * 16 * 3 * width + width + width + tokens * width
    assert size[1:-1] == [12 * width**2 + 13 * width] * 12
    assert size[-1] == 2 * width + 1000 * width + 1000
    assert layers.before == ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")


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
