"""Rules for where modules hold blocks: a table, because a policy does not show what lies between two layers."""

from dataclasses import dataclass

from .transformers_policy import IS_NEWER_THAN_COLOSSALAI


@dataclass(frozen=True)
class BlockRule:
    """Attribute paths from a module of a certain class to its block's column-parallel and row-parallel layers, etc."""

    inputs: tuple[str, ...]
    output: str
    parts: int = 1
    """The number of fused parts in the outputs of the first input layer (3 for q, k and v); each part has all units."""
    heads: str | None = None
    """Module whose attributes hold the widths of attention; ``""`` is the module itself; None for an MLP."""
    units: tuple[str, ...] = ()
    """Attributes of ``heads`` that may hold the number of units; the first that exists is used."""
    widths: tuple[str, ...] = ()
    """Attributes of ``heads`` that are in proportion to the number of units; missing ones are skipped."""
    dropouts: tuple[str, ...] = ()  # modules or attributes that hold the probability of dropout inside the block
    obstacles: tuple[str, ...] = ()
    """Modules or attributes that must be absent or 0: options whose result depends on the number of units."""


_HEADS = ("num_key_value_heads", "num_heads")
_WIDTHS = ("num_heads", "num_key_value_heads", "hidden_size", "embed_dim")
_SEPARATE_QKV = ("q_proj", "k_proj", "v_proj")

_LLAMA = BlockRule(_SEPARATE_QKV, "o_proj", 1, "", _HEADS, _WIDTHS, ("attention_dropout",), ("use_qk_norm",))

_GATED_MLP = BlockRule(("gate_proj", "up_proj"), "down_proj")


def _bert(holder: str, dropouts: tuple[str, ...]) -> BlockRule:
    inputs = (f"{holder}.query", f"{holder}.key", f"{holder}.value")
    units = ("num_attention_heads",)
    return BlockRule(inputs, "output.dense", 1, holder, units, (*units, "all_head_size"), dropouts)


_BERT_MLP = BlockRule(("intermediate.dense",), "output.dense")

_OPT = BlockRule(_SEPARATE_QKV, "out_proj", 1, "", ("num_heads",), _WIDTHS, ("dropout",))

_FC = BlockRule(("fc1",), "fc2", dropouts=("activation_dropout",))

RULES: dict[str, BlockRule] = {
    # timm
    "timm.Attention": BlockRule(
        ("qkv", "gate"), "proj", 3, "", ("num_heads",), ("num_heads", "attn_dim"), ("attn_drop",)
    ),
    "timm.Mlp": BlockRule(("fc1",), "fc2", dropouts=("drop1",)),
    "timm.GluMlp": BlockRule(("fc1",), "fc2", 2, dropouts=("drop1",)),
    "timm.SwiGLU": BlockRule(("fc1_g", "fc1_x"), "fc2", dropouts=("drop1",)),
    # transformers
    "transformers.BertAttention": _bert("self", ("self.dropout", "self.dropout_prob")),
    "transformers.BertLayer": _BERT_MLP,
    "transformers.ViTAttention": _bert("attention", ("attention.dropout_prob",)),
    "transformers.ViTLayer": _BERT_MLP,
    "transformers.GPT2Attention": BlockRule(
        *(("c_attn",), "c_proj", 3, "", ("num_heads",), ("num_heads", "split_size", "embed_dim")),
        *(("attn_dropout",), ("is_cross_attention",)),
    ),
    "transformers.GPT2MLP": BlockRule(("c_fc",), "c_proj"),
    "transformers.GPTJAttention": BlockRule(
        _SEPARATE_QKV,
        *("out_proj", 1, "", ("num_attention_heads",), ("num_attention_heads", "embed_dim")),
        ("attn_dropout",),
    ),
    "transformers.GPTJMLP": BlockRule(("fc_in",), "fc_out"),
    "transformers.LlamaAttention": _LLAMA,
    "transformers.LlamaMLP": _GATED_MLP,
    "transformers.MistralAttention": _LLAMA,
    "transformers.MistralMLP": _GATED_MLP,
    "transformers.MixtralAttention": _LLAMA,
    "transformers.Qwen2Attention": _LLAMA,
    "transformers.Qwen2MLP": _GATED_MLP,
    "transformers.Qwen3Attention": _LLAMA,
    "transformers.Qwen3MLP": _GATED_MLP,
    "transformers.CohereAttention": _LLAMA,
    "transformers.CohereMLP": _GATED_MLP,
    "transformers.OPTAttention": _OPT,
    "transformers.OPTDecoderLayer": _FC,
    "transformers.BloomMLP": BlockRule(("dense_h_to_4h",), "dense_4h_to_h"),
    "transformers.FalconAttention": BlockRule(
        ("query_key_value",),
        *("dense", 1, "", ("num_kv_heads", "num_heads"), ("num_heads", "num_kv_heads", "hidden_size", "split_size")),
        # Without ALiBi there is no dropout in attention, whatever the config says.
        obstacles=("config.alibi",),
    ),
    "transformers.FalconMLP": BlockRule(("dense_h_to_4h",), "dense_4h_to_h"),
    "transformers.T5DenseActDense": BlockRule(("wi",), "wo", dropouts=("dropout",)),
    "transformers.T5DenseGatedActDense": BlockRule(("wi_0", "wi_1"), "wo", dropouts=("dropout",)),
    "transformers.WhisperAttention": _OPT,
    "transformers.WhisperEncoderLayer": _FC,
    "transformers.WhisperDecoderLayer": _FC,
    "transformers.SamMLPBlock": BlockRule(("lin1",), "lin2"),
    "transformers.Blip2Attention": BlockRule(
        ("qkv",), "projection", 3, "", ("num_heads",), ("num_heads", "embed_dim"), ("dropout",)
    ),
    "transformers.Blip2MLP": BlockRule(("fc1",), "fc2"),
    "transformers.Blip2QFormerAttention": _bert("attention", ("attention.dropout",)),
    "transformers.Blip2QFormerLayer": BlockRule(("intermediate_query.dense",), "output_query.dense"),
}
"""Rules by ``package.Class``, which subclasses inherit. Attention with a bias per head (T5, BLOOM, Falcon with ALiBi)
is left out, because the bias of a migrated head would stay on its rank."""

if IS_NEWER_THAN_COLOSSALAI:
    RULES["transformers.ViTAttention"] = BlockRule(
        _SEPARATE_QKV, "o_proj", 1, "", ("num_attention_heads",), ("num_attention_heads",), ("attention_dropout",)
    )
    RULES["transformers.ViTMLP"] = _FC


def rule_for(kind: type) -> BlockRule | None:
    names = (f"{parent.__module__.partition('.')[0]}.{parent.__name__}" for parent in kind.__mro__)
    return next((RULES[name] for name in names if name in RULES), None)
