"""The blocks are those that Colossal-AI counts; parameters and FLOP per layer equal the formulas."""

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


def attention_flops(tokens: int, width: int) -> int:
    """FLOP of the attention scores and of the sum of the weighted values."""
    return 2 * 2 * tokens * tokens * width


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_families_of_transformers(name: str, device: str) -> None:
    kind, config = FAMILIES[name]
    with torch.device(device):
        model = kind(config)
    row = find_block_row(model)
    assert (row.name, len(row.blocks)) == (name, LAYERS)
    layers = describe_layers(model)
    assert layers.flops is None
    weights = {id(parameter): parameter.numel() for parameter in model.parameters()}
    tied = model.get_output_embeddings() is not None and (
        model.get_output_embeddings().weight is model.get_input_embeddings().weight
    )
    assert sum(layers.parameters) == sum(weights.values()) + tied * WORDS * HIDDEN
    assert layers.parameter_bytes == tuple(4 * count for count in layers.parameters)


def test_gpt2_equals_its_formulas() -> None:
    kind, config = FAMILIES["transformer.h"]
    with torch.device("meta"):
        layers = describe_layers(kind(config), ids())
    # A block has 12 h² + 13 h parameters, the embedding (V + positions) h, the tied head V h and the last norm 2 h.
    assert layers.parameters[1:-1] == (12 * HIDDEN**2 + 13 * HIDDEN,) * LAYERS
    assert layers.parameters[0] == (WORDS + config.n_positions) * HIDDEN
    assert layers.parameters[-1] == WORDS * HIDDEN + 2 * HIDDEN
    assert layers.flops is not None
    assert layers.flops[1:-1] == (24 * TOKENS * HIDDEN**2 + attention_flops(TOKENS, HIDDEN),) * LAYERS
    assert (layers.flops[0], layers.flops[-1]) == (0, 2 * TOKENS * HIDDEN * WORDS)


@pytest.mark.parametrize("name", ["model.layers", "bert.encoder.layer"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_flops_of_models_that_read_tensor_values(name: str, device: str) -> None:
    kind, config = FAMILIES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(config).train()
    random = torch.get_rng_state()
    layers = describe_layers(model, ids())
    matrices = {
        "model.layers": 4 * HIDDEN**2 + 3 * HIDDEN * INNER,
        "bert.encoder.layer": 4 * HIDDEN**2 + 2 * HIDDEN * INNER,
    }
    assert layers.flops is not None
    assert layers.flops[1:-1] == (2 * TOKENS * matrices[name] + attention_flops(TOKENS, HIDDEN),) * LAYERS
    assert model.training and torch.equal(torch.get_rng_state(), random)


def test_modules_are_placed_in_execution_order() -> None:
    kind, config = FAMILIES["model.decoder.layers"]
    layers = describe_layers(kind(config), ids())
    # OPT registers its last norm before its blocks.
    assert "model.decoder.final_layer_norm.weight" in layers.after
    assert "model.decoder.final_layer_norm.weight" in describe_layers(kind(config)).before


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_vision_transformer(device: str) -> None:
    with torch.device(device):
        model = timm.create_model("vit_tiny_patch16_224")
    layers = describe_layers(model, torch.zeros(2, 3, 224, 224))
    width, tokens = 192, 197
    assert (layers.row.name, len(layers.row.blocks)) == ("blocks", 12)
    assert layers.parameters[0] == 16 * 16 * 3 * width + width + width + tokens * width
    assert layers.parameters[1:-1] == (12 * width**2 + 13 * width,) * 12
    assert layers.parameters[-1] == 2 * width + 1000 * width + 1000
    assert layers.before == ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
    assert layers.flops is not None
    assert layers.flops[0] == 2 * 2 * 196 * 16 * 16 * 3 * width
    assert layers.flops[1:-1] == (2 * (24 * tokens * width**2 + attention_flops(tokens, width)),) * 12
    assert layers.flops[-1] == 2 * 2 * width * 1000


def test_a_wrapped_model_has_the_same_blocks() -> None:
    model = nn.ModuleDict({"module": timm.create_model("vit_tiny_patch16_224", depth=2)})
    assert find_block_row(model).name == "module.blocks"


def test_the_error_on_the_meta_device_names_a_model_that_needs_values() -> None:
    with pytest.raises(ValueError, match=r"Picky does not run on tensors without values .*leave the batch out"):
        describe_layers(Picky().to("meta"), torch.zeros(3, 2))
    torch.manual_seed(0)
    layers = describe_layers(Picky(), torch.tensor([[1.0, 0.0], [0.0, 0.0], [2.0, 3.0]]))
    assert layers.flops == (0, 2 * 2 * 2 * 2, 2 * 2 * 2 * 2, 0)  # of the two rows that are not all zero


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


class Picky(Twice):
    """Computes only with the rows that are not all zero."""

    def __init__(self) -> None:
        super().__init__()
        del self.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[x.any(dim=1).nonzero()[:, 0]]
        for part in self.parts:
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
