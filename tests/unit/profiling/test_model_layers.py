"""The blocks are those that Colossal-AI counts, and the bytes of each layer equal the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import nn

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (imports packages that transformers needs, without their warnings)
from colossal_hetero.profiling.model_layers import describe_layers, find_block_row

# isort: split
import transformers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

HIDDEN, INNER, WORDS, TOKENS, LAYERS = 32, 64, 50, 16, 3
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "vocab_size": WORDS}
WIDE = {**SIZES, "intermediate_size": INNER}
FAMILIES: dict[str, tuple[type, Any]] = {
    "transformer.h": (GPT2LMHeadModel, GPT2Config(n_embd=HIDDEN, n_layer=LAYERS, n_head=2, vocab_size=WORDS)),
    "model.layers": (LlamaForCausalLM, LlamaConfig(**WIDE)),
    "bert.encoder.layer": (BertForSequenceClassification, BertConfig(**WIDE)),
    "model.decoder.layers": (OPTForCausalLM, OPTConfig(**SIZES, ffn_dim=INNER, word_embed_proj_dim=HIDDEN)),
}


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
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


def test_gpt2_equals_its_formulas() -> None:
    kind, config = FAMILIES["transformer.h"]
    size = [count / 4 for count in describe_layers(kind(config), ids()).parameter_bytes]
    # A block has 12 h² + 13 h parameters, the embedding (V + positions) h, the tied head V h and the last norm 2 h.
    assert size[1:-1] == [12 * HIDDEN**2 + 13 * HIDDEN] * LAYERS
    assert size[0] == (WORDS + config.n_positions) * HIDDEN
    assert size[-1] == WORDS * HIDDEN + 2 * HIDDEN


def test_vision_transformer() -> None:
    model = timm.create_model("vit_tiny_patch16_224")
    layers = describe_layers(model, torch.zeros(2, 3, 224, 224))
    width, tokens = 192, 197
    assert (layers.row.name, len(layers.row.blocks)) == ("blocks", 12)
    size = [count / 4 for count in layers.parameter_bytes]
    assert size[0] == 16 * 16 * 3 * width + width + width + tokens * width
    assert size[1:-1] == [12 * width**2 + 13 * width] * 12
    assert size[-1] == 2 * width + 1000 * width + 1000
    assert layers.before == ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")


def test_a_wrapped_model_has_the_same_blocks() -> None:
    model = nn.ModuleDict({"module": timm.create_model("vit_tiny_patch16_224", depth=2)})
    assert find_block_row(model).name == "module.blocks"


def test_a_model_with_two_rows_of_blocks() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config(num_layers=2, d_model=32, d_ff=64, num_heads=2, vocab_size=50))
    with pytest.raises(ValueError, match=r"more than one row of blocks: decoder.block, encoder.block; .*name the row"):
        find_block_row(model)
    assert len(find_block_row(model, "encoder.block").blocks) == 2
    with pytest.raises(ValueError, match=r"no row of blocks 'blocks'; it has encoder.block, decoder.block"):
        find_block_row(model, "blocks")


def test_a_model_without_blocks() -> None:
    with pytest.raises(ValueError, match="Sequential has no ModuleList or Sequential of modules of one class"):
        find_block_row(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))


class Twice(nn.Module):
    """Runs its blocks twice, which is not possible in a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.parts = nn.ModuleList(Part() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in [*self.parts, *self.parts]:
            x = part(x)
        return x


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_blocks_that_run_twice() -> None:
    with pytest.raises(ValueError, match=r"Twice does not run each module of parts exactly once"):
        describe_layers(Twice(), torch.zeros(1, 2))
