"""A tiny model with random weights and its inputs for each model family of Colossal-AI, and what they need on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.sam.configuration_sam import SamMaskDecoderConfig, SamPromptEncoderConfig, SamVisionConfig

from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI

Inputs = dict[str, torch.Tensor]

VOCABULARY = 128  # a multiple of 64 · ranks, so that embeddings are not padded


def _tokens(length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, length), generator=torch.Generator().manual_seed(2))


def _images(size: int) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(3))


# Configurations without dropout, whose sizes have other names.
BERT = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8)
BERT |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LLAMA = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)
GPT2 = dict(n_positions=16, n_layer=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
FALCON = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, multi_query=False)
FALCON |= dict(attention_dropout=0.0, hidden_dropout=0.0)
OPT = dict(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, dropout=0.0)
BLOOM = dict(hidden_size=32, n_layer=2, n_head=4, hidden_dropout=0.0, attention_dropout=0.0)
T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0, decoder_start_token_id=0)

TEXT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "ForMaskedLM", BERT),
    "gpt2": ("GPT2", "LMHeadModel", GPT2 | dict(n_embd=36, n_head=6, attn_implementation="eager")),
    "gptj": ("GPTJ", "ForCausalLM", GPT2 | dict(n_embd=32, n_head=4, rotary_dim=4)),
    "llama": ("Llama", "ForCausalLM", LLAMA),
    "mistral": ("Mistral", "ForCausalLM", LLAMA),
    "mixtral": ("Mixtral", "ForCausalLM", LLAMA | dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2": ("Qwen2", "ForCausalLM", LLAMA),
    "qwen3": ("Qwen3", "ForCausalLM", LLAMA | dict(head_dim=8)),
    "cohere": ("Cohere", "ForCausalLM", LLAMA | dict(pad_token_id=0)),
    "opt": ("OPT", "ForCausalLM", OPT | dict(max_position_embeddings=16, attn_implementation="eager")),
    "bloom": ("Bloom", "ForCausalLM", BLOOM),
    "falcon": ("Falcon", "ForCausalLM", FALCON | dict(num_kv_heads=4, new_decoder_architecture=True)),
    # With a bias per head, as in Falcon-RW.
    "falcon_alibi": ("Falcon", "ForCausalLM", FALCON | dict(alibi=True, parallel_attn=False, bias=True)),
    "t5": ("T5", "ForConditionalGeneration", T5),
}
"""The names of the configuration and of the model in ``transformers``, and the sizes."""


def _text(name: str) -> tuple[nn.Module, Inputs]:
    family, kind, sizes = TEXT[name]
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, **sizes)
    tokens = _tokens()
    inputs = dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)
    return getattr(transformers, f"{family}{kind}")(config), inputs


def vit() -> tuple[nn.Module, Inputs]:
    sizes = BERT | dict(hidden_size=36, intermediate_size=60, num_attention_heads=6)
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=6)
    return transformers.ViTForImageClassification(config), dict(pixel_values=_images(8), labels=torch.tensor([1, 4]))


def whisper() -> tuple[nn.Module, Inputs]:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=8,
        max_target_positions=16, dropout=0.0, decoder_start_token_id=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(4))
    return transformers.WhisperForConditionalGeneration(config), dict(input_features=features, labels=_tokens())


def sam() -> tuple[nn.Module, Inputs]:
    layers = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, mlp_dim=48)
    vision = SamVisionConfig(
        **layers, output_channels=32, image_size=32, patch_size=8, window_size=2, global_attn_indexes=[1],
        num_pos_feats=16,
    )  # fmt: skip
    prompt = SamPromptEncoderConfig(hidden_size=32, image_size=32, patch_size=8, mask_input_channels=4)
    config = transformers.SamConfig(vision, prompt, SamMaskDecoderConfig(**layers, iou_head_hidden_dim=32))
    points = torch.tensor([[[[3.0, 5.0]]], [[[20.0, 9.0]]]])
    return transformers.SamModel(config), dict(pixel_values=_images(32), input_points=points)


def blip2() -> tuple[nn.Module, Inputs]:
    sizes = BERT | dict(num_attention_heads=4)
    vision = {name: size for name, size in sizes.items() if "dropout" not in name} | dict(image_size=8, patch_size=4)
    qformer = sizes | dict(vocab_size=VOCABULARY, encoder_hidden_size=32, cross_attention_frequency=1)
    text = OPT | dict(model_type="opt", vocab_size=VOCABULARY, max_position_embeddings=32)
    config = transformers.Blip2Config(vision, qformer, text, num_query_tokens=4, image_token_index=5)
    tokens = torch.cat([torch.full((2, 4), 5), _tokens()[:2].clamp(min=6)], dim=1)
    inputs = dict(pixel_values=_images(8), input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
    return transformers.Blip2ForConditionalGeneration(config), inputs


BUILDERS: dict[str, Callable[[], tuple[nn.Module, Inputs]]] = {
    **{name: partial(_text, name) for name in TEXT},
    **{family.__name__: family for family in (vit, whisper, sam, blip2)},
}
"""A function for each family, which makes a model and its inputs."""
if IS_NEWER_THAN_COLOSSALAI:
    for name in ("gptj", "mixtral", "opt", "bloom", "falcon", "falcon_alibi", "sam", "blip2"):
        del BUILDERS[name]  # neither Colossal-AI nor transformers has a plan for them

# Two ranks compute a different result than one with these models. Colossal-AI 0.5.0 divides the heads of SAM's
# self-attention among the ranks, but not those of its cross-attention; each rank computes Falcon's ALiBi as if its own
# heads were all. For them, this package's layers are compared with Colossal-AI's.
UNLIKE_THE_UNSHARDED_MODEL = {"sam", "falcon_alibi"}

# ChatGLM and DeepSeek are not tested here, because their policies are for model code that is downloaded with the
# weights. tests/unit/layers/test_policy.py tests their policies.

# Cohere's attention accepts the mask that its model makes only with flash attention.
SHARDING_OPTIONS: dict[str, dict[str, Any]] = {"cohere": dict(enable_flash_attention=True)}


def family_loss(inputs: Inputs) -> Callable[[nn.Module], torch.Tensor]:
    """A function that returns the loss of a model for these inputs; calls draw the same random numbers."""

    def loss_of(model: nn.Module) -> torch.Tensor:
        torch.manual_seed(5)
        output = model(**inputs)
        if output.get("loss") is not None:
            return output["loss"]
        return (output["pred_masks"] ** 2).mean() + output["iou_scores"].sum()

    return loss_of


def allow_cpu() -> None:
    """Replace two calls in which Colossal-AI asks for a GPU that it does not need, until the ranks end: GPT-2's
    forward selects the tensor's device with ``torch.cuda``, and Cohere's attention takes a kernel that is declared
    for CUDA only."""
    if torch.cuda.is_available():
        return
    from colossalai.kernel.extensions import FlashAttentionSdpaCudaExtension

    torch.cuda.set_device = lambda device: None
    FlashAttentionSdpaCudaExtension.is_available = lambda self: True
