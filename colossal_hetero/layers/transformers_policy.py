"""Tensor and pipeline parallelism for models of newer versions of transformers than Colossal-AI knows, with the
library's own forward pass (docs/newer-versions.md). Layers are divided as the model's configuration says
(``base_model_tp_plan``), or as :data:`PLANS` says for families without one.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import transformers
from colossalai.lazy import LazyInitContext
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer._utils import getattr_, setattr_
from colossalai.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    Embedding1D,
    GPT2FusedLinearConv1D_Col,
    GPT2FusedLinearConv1D_Row,
    Linear1D_Col,
    Linear1D_Row,
    LinearWithGradAccum,
    VocabParallelEmbedding1D,
    VocabParallelLMHead1D,
)
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from .timm_vit import stage_ranges

IS_NEWER_THAN_COLOSSALAI = int(transformers.__version__.partition(".")[0]) >= 5
"""True if Colossal-AI's copies of forward passes are of an older major version, whose blocks return tuples."""
HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "num_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
"""Fields of configurations with numbers of heads, which tensor parallelism divides."""


@dataclass(frozen=True)
class ShardingPlan:
    """How a model is divided. Names are relative to its base model; ``*`` stands for the number of a block.

    Attributes:
        styles: for each layer how it is divided, in the words of transformers: ``colwise``, ``rowwise``,
            ``colwise_gather_output``, ``rowwise_split_input``; also ``colwise_of_N`` for N layers in one weight.
        blocks: the list of blocks that stages divide; "" if a pipeline is impossible.
        embeddings: what the first stage runs before the blocks, whose output is what they take.
        added: what adds to that output before the blocks.
        before: what changes that output before the blocks.
        after: what the last stage runs after the blocks.
        divided: attributes that count heads or features of a rank.
        dropouts: dropouts of divided activations, drawn differently on each rank; others are equal on all ranks.
    """

    styles: Mapping[str, str] = field(default_factory=dict)
    blocks: str = ""
    embeddings: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()


_T5_ATTENTIONS = ("SelfAttention", "EncDecAttention")
_WHISPER_ATTENTIONS = ("self_attn", "encoder_attn")
PLANS: dict[str, ShardingPlan] = {
    "bert": ShardingPlan(
        styles={
            "encoder.layer.*.attention.self.query": "colwise",
            "encoder.layer.*.attention.self.key": "colwise",
            "encoder.layer.*.attention.self.value": "colwise",
            "encoder.layer.*.attention.output.dense": "rowwise",
            "encoder.layer.*.intermediate.dense": "colwise",
            "encoder.layer.*.output.dense": "rowwise",
        },
        blocks="encoder.layer",
        embeddings=("embeddings",),
        after=("pooler",),
        divided=("encoder.layer.*.attention.self.num_attention_heads", "encoder.layer.*.attention.self.all_head_size"),
        dropouts=("encoder.layer.*.attention.self.dropout",),
    ),
    "gpt2": ShardingPlan(
        styles={
            "h.*.attn.c_attn": "colwise_of_3",
            "h.*.attn.c_proj": "rowwise",
            "h.*.crossattention.q_attn": "colwise",
            "h.*.crossattention.c_attn": "colwise_of_2",
            "h.*.crossattention.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        blocks="h",
        embeddings=("wte",),
        added=("wpe",),
        before=("drop",),
        after=("ln_f",),
        divided=tuple(
            f"h.*.{attention}.{name}"
            for attention in ("attn", "crossattention")
            for name in ("embed_dim", "num_heads", "split_size")
        ),
        dropouts=("h.*.attn_dropout", "h.*.attn.attn_dropout", "h.*.crossattention.attn_dropout"),
    ),
    "t5": ShardingPlan(
        styles={
            f"*.block.*.layer.*.{attention}.{name}": style
            for attention in _T5_ATTENTIONS
            for name, style in dict(
                q="colwise", k="colwise", v="colwise", o="rowwise", relative_attention_bias="embedding"
            ).items()
        }
        | {f"*.block.*.layer.*.DenseReluDense.{name}": "colwise" for name in ("wi", "wi_0", "wi_1")}
        | {"*.block.*.layer.*.DenseReluDense.wo": "rowwise"},
        divided=tuple(
            f"*.block.*.layer.*.{attention}.{name}" for attention in _T5_ATTENTIONS for name in ("n_heads", "inner_dim")
        ),
        dropouts=("*.block.*.layer.*.DenseReluDense.dropout",),
    ),
    "vit": ShardingPlan(
        styles={f"layers.*.attention.{name}_proj": "colwise" for name in "qkv"}
        | {"layers.*.attention.o_proj": "rowwise", "layers.*.mlp.fc1": "colwise", "layers.*.mlp.fc2": "rowwise"},
        blocks="layers",
        embeddings=("embeddings",),
        after=("layernorm", "pooler"),
        divided=("layers.*.attention.num_attention_heads",),
    ),
    "whisper": ShardingPlan(
        styles={
            f"*.layers.*.{attention}.{name}_proj": "rowwise" if name == "out" else "colwise"
            for attention in _WHISPER_ATTENTIONS
            for name in ("q", "k", "v", "out")
        }
        | {"*.layers.*.fc1": "colwise", "*.layers.*.fc2": "rowwise"},
        divided=tuple(
            f"*.layers.*.{attention}.{name}" for attention in _WHISPER_ATTENTIONS for name in ("num_heads", "embed_dim")
        ),
    ),
}
"""Plans of families that have none of their own, by ``model_type`` of the configuration."""

TESTED = {
    *PLANS,
    "cohere",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "glm",
    "gpt_oss",
    "granite",
    "llama",
    "mistral",
    "olmo2",
}
TESTED |= {"phi3", "qwen2", "qwen3", "smollm3", "starcoder2"}
"""Model types that are compared with the unsharded model in tests; others are divided with a warning."""

_IGNORED = ("replicated_with_grad_allreduce", "embedding_rowwise", "replicate")
"""Styles for which nothing is to be done: gradients are summed where graphs show it, and vocabularies are divided."""


def plan_of(model: Any) -> ShardingPlan:
    """The plan of a model of transformers, which may be empty."""
    config = model.config
    if config.model_type in PLANS:
        return PLANS[config.model_type]
    styles = dict(getattr(config, "base_model_tp_plan", None) or {})
    parts = getattr(config, "base_model_pp_plan", None) or {}
    if "layers" not in parts:
        return ShardingPlan(styles)
    names = list(parts)
    where = names.index("layers")
    return ShardingPlan(styles, "layers", tuple(names[:where]), after=tuple(names[where + 1 :]))


class TransformersPolicy(Policy):
    """Shards a model of transformers whose forward pass stays the library's own. In a pipeline the first stage holds
    the embeddings, the last stage what comes after the blocks. Every stage gets the whole micro-batch, a dict."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self._plan = plan_of(model)
        self._buffers: dict[str, Tensor] = {}

    # What can be sharded ----------------------------------------------------------------------------------

    def config_sanity_check(self) -> None:
        config, kind = self.shard_config, type(self.model).__name__
        version = f"transformers {transformers.__version__}"
        if config.enable_sequence_parallelism:
            raise ValueError(f"sequence parallelism of {kind} needs Colossal-AI's own passes, not those of {version}")
        unused = [
            name
            for name in ("enable_fused_normalization", "enable_flash_attention", "enable_jit_fused")
            if getattr(config, name)
        ]
        if unused:
            warnings.warn(f"{', '.join(unused)} has no effect on {kind} of {version}", stacklevel=2)
        if config.tensor_parallel_size > 1:
            self._check_layers(config.tensor_parallel_size)
        if self.pipeline_stage_manager is not None and not self._plan.blocks:
            raise ValueError(f"{kind} of {version} cannot be cut into pipeline stages; use pp_size=1")
        if self._use_zbv and config.tensor_parallel_size == 1:
            linear = [module for _, module, _ in self._layers() if isinstance(module, nn.Linear)]
            if not linear or any(isinstance(module, Conv1D) for module in self.model.modules()):
                raise ValueError(
                    f"the zero-bubble schedule needs layers that compute the gradients of their weights later, which "
                    f'Colossal-AI has not for {kind}; use pp_style="1f1b" or "interleaved"'
                )

    def _check_layers(self, tp_size: int) -> None:
        kind, version = type(self.model).__name__, f"transformers {transformers.__version__}"
        if not self._plan.styles:
            raise ValueError(f"{version} has no plan that divides {kind} over ranks; use tp_size=1")
        for name, module, style in self._layers():
            if not style.startswith(("colwise", "rowwise", "embedding")):
                raise ValueError(f"tensor parallelism cannot divide {name} of {kind} ({style}); use tp_size=1")
            if type(module) not in (nn.Linear, nn.Embedding, Conv1D):
                raise ValueError(
                    f"tensor parallelism cannot divide {name} of {kind}, a {type(module).__name__}; use tp_size=1"
                )
        if self.model.config.model_type not in TESTED:
            warnings.warn(
                f"{kind} is divided as its configuration says (base_model_tp_plan), which this package has not tested "
                "for this model: compare the loss of a first step with that of one process",
                stacklevel=2,
            )
        config = self.model.config
        heads = {name: getattr(config, name) for name in HEADS if isinstance(getattr(config, name, None), int)}
        wrong = {name: number for name, number in heads.items() if number % tp_size}
        if wrong:
            common = math.gcd(*heads.values())
            valid = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            given = ", ".join(f"{name}={number}" for name, number in wrong.items())
            raise ValueError(f"tp_size={tp_size} does not divide {given} of {kind}; valid tp sizes: {valid}")

    def _layers(self) -> Iterator[tuple[str, nn.Module, str]]:
        for pattern, style in self._plan.styles.items():
            if style not in _IGNORED:
                for name, module in self._matching(pattern):
                    yield name, module, style

    def _matching(self, pattern: str) -> Iterator[tuple[str, Any]]:
        holder, _, last = pattern.rpartition(".")
        for name, module in self._base.named_modules():
            if _matches(name, holder) and (found := getattr(module, last, None)) is not None:
                yield self._prefix + f"{name}.{last}", found

    @property
    def _base(self) -> nn.Module:
        return self.model.base_model

    @property
    def _prefix(self) -> str:
        return "" if self._base is self.model else f"{self.model.base_model_prefix}."

    # Sharding ---------------------------------------------------------------------------------------------

    def preprocess(self) -> nn.Module:
        if self.pipeline_stage_manager is not None:
            blocks = f"{self._prefix}{self._plan.blocks}."
            self._buffers = {name: each for name, each in self.model.named_buffers() if not name.startswith(blocks)}
        return self.model

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        replaced: list[SubModuleReplacementDescription] = []
        if self.shard_config.enable_tensor_parallelism:
            replaced += [self._divided_layer(*layer) for layer in self._layers()]
            replaced += [*self._vocabularies(), *self._dropouts()]
        elif self._use_zbv:
            linear = [(name, module) for name, module, _ in self._layers() if isinstance(module, nn.Linear)]
            replaced += [self._replacement(name, LinearWithGradAccum, use_zbv=True) for name, _ in linear]
        return {type(self.model): ModulePolicyDescription(sub_module_replacement=replaced)} if replaced else {}

    @property
    def _use_zbv(self) -> bool:
        return self.pipeline_stage_manager is not None and self.pipeline_stage_manager.use_zbv

    def _replacement(self, name: str, target: type, **kwargs: Any) -> SubModuleReplacementDescription:
        kwargs.update(fp8_communication=self.shard_config.fp8_communication)
        return SubModuleReplacementDescription(name, target, kwargs)

    def _divided_layer(self, name: str, module: nn.Module, style: str) -> SubModuleReplacementDescription:
        if style == "embedding":
            return self._replacement(name, Embedding1D, gather_output=False)
        options: dict[str, Any] = {"use_zbv": self._use_zbv}
        if style.startswith("rowwise"):
            options["parallel_input"] = style != "rowwise_split_input"
            return self._replacement(
                name, GPT2FusedLinearConv1D_Row if isinstance(module, Conv1D) else Linear1D_Row, **options
            )
        if isinstance(module, Conv1D):
            parts = int(style.rpartition("_")[2]) if "_of_" in style else 1
            return self._replacement(
                name, GPT2FusedLinearConv1D_Col, split_sizes=[module.nf // parts] * parts, **options
            )
        return self._replacement(name, Linear1D_Col, gather_output=style == "colwise_gather_output", **options)

    def _vocabularies(self) -> Iterator[SubModuleReplacementDescription]:
        """The embeddings of the vocabulary, and the head, whose output is gathered for the library's own losses."""
        embedding, head = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        if type(embedding) is not nn.Embedding or type(head) not in (nn.Linear, type(None)):
            return  # such as Gemma's, which multiplies by a constant: every rank has them whole
        multiple = {"make_vocab_size_divisible_by": self.shard_config.make_vocab_size_divisible_by}
        for name, module in self.model.named_modules(remove_duplicate=False):
            if isinstance(module, nn.Embedding) and module.weight is embedding.weight:
                yield self._replacement(name, VocabParallelEmbedding1D, **multiple)
            elif module is head:
                yield self._replacement(name, VocabParallelLMHead1D, gather_output=True, **multiple)

    def _dropouts(self) -> Iterator[SubModuleReplacementDescription]:
        for name, module in self.model.named_modules():
            if type(module) is nn.Dropout and module.p > 0:
                inside = name.removeprefix(self._prefix)
                is_parallel = any(_matches(inside, pattern) for pattern in self._plan.dropouts)
                target = DropoutForParallelInput if is_parallel else DropoutForReplicatedInput
                yield SubModuleReplacementDescription(name, target)

    def postprocess(self) -> nn.Module:
        if self.shard_config.enable_tensor_parallelism:
            self._divide_numbers(self.shard_config.tensor_parallel_size)
        if self.pipeline_stage_manager is not None:
            # Those of other stages' modules were released, but the library's forward may read them.
            for name, buffer in self._buffers.items():
                setattr_(self.model, name, buffer)
            LazyInitContext.materialize(self.model)
            self._buffers = {}
            _run_as_stage(self.model, self._plan, self.pipeline_stage_manager)
        return self.model

    def _divide_numbers(self, tp_size: int) -> None:
        for pattern in self._plan.divided:
            for name, number in self._matching(pattern):
                setattr_(self.model, name, number // tp_size)
        config = self.model.config
        for pattern in self._plan.styles:
            if pattern.endswith(".k_proj") and not self._plan.divided:
                # The library's passes need no numbers of heads, but whole heads migrate by them.
                for name, _ in self._matching(pattern):
                    holder = getattr_(self.model, name.rpartition(".")[0])
                    holder.num_heads = config.num_attention_heads // tp_size
                    holder.num_key_value_heads = config.num_key_value_heads // tp_size

    # Pipeline ---------------------------------------------------------------------------------------------

    def get_held_layers(self) -> list[nn.Module]:
        plan, base, stage_manager = self._plan, self._base, self.pipeline_stage_manager
        blocks = getattr_(base, plan.blocks)
        first = [getattr_(base, name, ignore=True) for name in (*plan.embeddings, *plan.added, *plan.before)]
        last = [getattr_(base, name, ignore=True) for name in plan.after]
        last += [module for module in self.model.children() if module is not base] if base is not self.model else []
        elsewhere = {id(module) for module in (*first, *last)} | {id(_owner(base, plan.blocks))}
        held = [module for module in base.children() if id(module) not in elsewhere]
        for start, end in stage_ranges(stage_manager, len(blocks)):
            held += blocks[start:end]
        if stage_manager.is_first_stage(ignore_chunk=True):
            held += first
        # A zero-bubble schedule is V-shaped: its last chunk is back on the first stage.
        is_last = stage_manager.is_first_stage if stage_manager.use_zbv else stage_manager.is_last_stage
        if is_last(ignore_chunk=True):
            held += last
        return [module for module in held if module is not None]

    def get_shared_params(self) -> list[dict[int, Tensor]]:
        stage_manager, head = self.pipeline_stage_manager, self.model.get_output_embeddings()
        if stage_manager is None or stage_manager.num_stages == 1 or stage_manager.use_zbv or head is None:
            return []
        embedding = self.model.get_input_embeddings()
        is_tied = embedding.weight is head.weight
        return [{0: embedding.weight, stage_manager.num_stages - 1: head.weight}] if is_tied else []


def _matches(name: str, pattern: str) -> bool:
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(want in ("*", part) for part, want in zip(parts, wanted, strict=True))


def _owner(base: nn.Module, blocks: str) -> nn.Module:
    return getattr(base, blocks.partition(".")[0])


class _Stage:
    """What a stage runs in the current call: the range of its blocks, on what the stage before sent."""

    def __init__(self, manager: PipelineStageManager, blocks: tuple[int, int]) -> None:
        self.manager = manager
        self.default = self.blocks = blocks
        self.received: Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.manager.is_first_stage()

    @property
    def is_last(self) -> bool:
        return self.manager.is_last_stage()


def _run_as_stage(model: nn.Module, plan: ShardingPlan, manager: PipelineStageManager) -> None:
    base: Any = model.base_model  # type: ignore[assignment]
    blocks = getattr_(base, plan.blocks)
    ranges = stage_ranges(manager, len(blocks))
    if manager.is_interleave:
        manager.stage_indices = ranges  # the schedule passes that of the chunk that it runs
    stage = _Stage(manager, ranges[0])

    def replace(names: tuple[str, ...], forward: Callable) -> None:
        for name in names:
            if (module := getattr_(base, name, ignore=True)) is not None:
                module.forward = partial(forward, stage, module.forward)

    replace(plan.embeddings, _received)
    replace(plan.added, _nothing_added)
    replace(plan.before, _unchanged_unless_first)
    replace(plan.after, _unchanged_unless_last)
    for index, block in enumerate(blocks):
        block.forward = partial(_block, stage, block.forward, index)
    model.forward = _StageForward(stage, model, base)
    projection = getattr_(base, "embeddings.patch_embeddings.projection", ignore=True)
    if projection is not None and projection.weight is None:
        # The library's forward reads the dtype to which images are cast, which only the first stage uses.
        del projection._parameters["weight"]
        projection.weight = next(model.parameters()).new_empty(0).detach()


def _received(stage: _Stage, own: Callable, *args: Any, **kwargs: Any) -> Any:
    return own(*args, **kwargs) if stage.is_first else stage.received


def _nothing_added(stage: _Stage, own: Callable, *args: Any, **kwargs: Any) -> Any:
    if stage.is_first:
        return own(*args, **kwargs)
    assert stage.received is not None
    return stage.received.new_zeros(())


def _unchanged_unless_first(stage: _Stage, own: Callable, hidden: Tensor) -> Tensor:
    return own(hidden) if stage.is_first else hidden


def _unchanged_unless_last(stage: _Stage, own: Callable, hidden: Tensor) -> Tensor:
    return own(hidden) if stage.is_last else hidden


def _block(stage: _Stage, own: Callable, index: int, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    start, end = stage.blocks
    if start <= index < end:
        return own(hidden, *args, **kwargs)
    return hidden if IS_NEWER_THAN_COLOSSALAI else (hidden,)


class _StageForward:
    """The forward of a model's stage, which returns ``{"hidden_states": [B, N, D]}`` for the next stage, or on the last
    stage the model's output."""

    def __init__(self, stage: _Stage, model: nn.Module, base: nn.Module) -> None:
        self._stage = stage
        self._own, self._base = model.forward, base.forward
        self._signature = inspect.signature(model.forward)
        self._of_base = inspect.signature(base.forward).parameters

    def __call__(
        self,
        *args: Any,
        hidden_states: Tensor | None = None,
        stage_index: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Any:
        self._stage.received, self._stage.blocks = hidden_states, stage_index or self._stage.default
        if "use_cache" in self._signature.parameters:
            kwargs["use_cache"] = False
        if self._stage.is_last:
            return self._own(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        output = self._base(**{name: value for name, value in given.items() if name in self._of_base})
        return {"hidden_states": output[0]}
