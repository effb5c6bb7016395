"""Tensor and pipeline parallelism for timm's VisionTransformer, for which Colossal-AI has no policy.

A rank has whole heads of each third of ``attn.qkv`` and of ``attn.gate``, rows of ``mlp.fc1``, and the columns of
``attn.proj`` and ``mlp.fc2`` that follow. Every rank holds the whole residual stream ``[B, N, D]`` with its norms, the
embedding, and the classifier, which takes almost no time and, undivided, works for any number of classes.

Dropout after a sharded layer differs between ranks; that on the residual stream is equal. ``set_grad_checkpointing``
does not restore the random state of these layers, so use either dropout or that; stages of a plan that recompute have
both. Other random parts use the global random state, which is equal on all ranks that start with one seed.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from colossalai.lazy import LazyInitContext
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.layer import (
    DropoutForParallelInput,
    DropoutForReplicatedInput,
    FusedLinear1D_Col,
    Linear1D_Col,
    Linear1D_Row,
    LinearWithGradAccum,
)
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from timm.layers import GluMlp, Mlp, SwiGLU
from timm.models.vision_transformer import Attention, Block, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn
from torch.utils.checkpoint import checkpoint

from .partial_gradients import Shapes, shapes_of, sum_partial_gradients

_BLOCKS = (Block, ResPostBlock, ParallelThingsBlock)
_MLPS = (Mlp, GluMlp, SwiGLU)


class TimmViTPolicy(Policy):
    """Shards a timm ``VisionTransformer``, or a subclass of it, with Colossal-AI's own layers, which
    :func:`.hetero_policy` replaces. In a pipeline the first stage holds the embedding and the tokens, the last stage
    the final norm, pooling and classifier. A micro-batch is a tensor of images, a tuple that begins with it, or a dict
    with the images as ``x``; only the criterion uses its other elements."""

    model: VisionTransformer

    def __init__(self) -> None:
        super().__init__()
        self._root_parameters: dict[str, nn.Parameter] = {}
        self._shapes: Shapes = {}

    def config_sanity_check(self) -> None:
        config = self.shard_config
        unused = [
            name
            for name in ("enable_fused_normalization", "enable_jit_fused", "enable_sequence_parallelism")
            if getattr(config, name)
        ]
        if unused:
            warnings.warn(f"{', '.join(unused)} has no effect on timm's VisionTransformer", stacklevel=2)
        if config.tensor_parallel_size > 1:
            self._check_blocks(config.tensor_parallel_size)
        if config.pipeline_stage_manager is not None:
            self._check_forward()

    def _check_blocks(self, tp_size: int) -> None:
        for index, block in enumerate(self.model.blocks):
            if not isinstance(block, _BLOCKS):
                raise ValueError(
                    f"blocks.{index} is a {type(block).__name__}, which tensor parallelism cannot split; "
                    f"valid block_fn: {_names(_BLOCKS)}"
                )
        heads = set()
        for name, attention in self._attentions():
            if _kind(attention, (Attention,)) is None:
                raise ValueError(
                    f"{name} is a {type(attention).__name__}, which tensor parallelism cannot split; "
                    "valid attn_layer: 'attn' (timm's Attention)"
                )
            _check_no_norm(f"{name}.norm", attention.norm, "scale_attn_norm", attention.attn_dim)
            heads.add(attention.num_heads)
        hidden = set()
        for name, mlp in self._mlps():
            if _kind(mlp, _MLPS) is None:
                raise ValueError(
                    f"{name} is a {type(mlp).__name__}, which tensor parallelism cannot split; "
                    f"valid mlp_layer: {_names(_MLPS)}"
                )
            _check_no_norm(f"{name}.norm", mlp.norm, "scale_mlp_norm", mlp.fc2.in_features)
            hidden.add(mlp.fc2.in_features)
        if any(size % tp_size for size in heads | hidden):
            common = math.gcd(*heads, *hidden)
            valid = [size for size in range(1, common + 1) if common % size == 0]
            raise ValueError(
                f"tp_size={tp_size} does not divide both the number of heads ({_join(heads)}) and the MLP's "
                f"hidden size ({_join(hidden)}) of this VisionTransformer, whose embed_dim is "
                f"{self.model.embed_dim}; valid tp sizes: {_join(valid)}"
            )

    def _check_forward(self) -> None:
        kind = type(self.model)
        parts = ("forward", "forward_features", "forward_head", "pool", "_pos_embed")
        changed = [part for part in parts if getattr(kind, part) is not getattr(VisionTransformer, part)]
        if changed:
            raise ValueError(
                f"{kind.__name__} has its own {', '.join(changed)}, which cannot be divided into pipeline stages; "
                "use pp_size=1 or timm's VisionTransformer itself"
            )

    def _attentions(self) -> Iterator[tuple[str, nn.Module]]:
        for index, block in enumerate(self.model.blocks):
            for name, module in block.named_modules():
                if name.rpartition(".")[2] == "attn":
                    yield f"blocks.{index}.{name}", module

    def _mlps(self) -> Iterator[tuple[str, nn.Module]]:
        for name, module in self.model.named_modules():
            if name.rpartition(".")[2] == "mlp":
                yield name, module

    def preprocess(self) -> nn.Module:
        self._shapes = shapes_of(self.model)
        # When other stages' modules are released, the tokens are set to None too, because no held module contains them.
        self._root_parameters = {
            name: parameter for name, parameter in self.model._parameters.items() if parameter is not None
        }
        return self.model

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        policy: dict[str | type[nn.Module], ModulePolicyDescription] = {}
        if self.shard_config.enable_tensor_parallelism:
            self._shard_attention(policy)
            self._shard_mlps(policy)
            self._replace_dropouts(policy)
        elif self._use_zbv:
            self._split_backward(policy)
        if self.pipeline_stage_manager is not None:
            self._set_pipeline_forward(policy)
        return policy

    @property
    def _use_zbv(self) -> bool:
        return self.pipeline_stage_manager is not None and self.pipeline_stage_manager.use_zbv

    def _linear(self, suffix: str, target: type, **kwargs: Any) -> SubModuleReplacementDescription:
        kwargs.update(fp8_communication=self.shard_config.fp8_communication, use_zbv=self._use_zbv)
        return SubModuleReplacementDescription(suffix, target, kwargs, ignore_if_not_exist=True)

    def _shard_attention(self, policy: dict) -> None:
        tp_size = self.shard_config.tensor_parallel_size
        for attention in _one_of_each_class(self._attentions()):
            heads, width = attention.num_heads, attention.attn_dim
            policy[type(attention)] = ModulePolicyDescription(
                attribute_replacement={"num_heads": heads // tp_size, "attn_dim": width // tp_size},
                sub_module_replacement=[
                    self._linear("qkv", FusedLinear1D_Col, split_sizes=[width] * 3),
                    self._linear("gate", Linear1D_Col),
                    self._linear("proj", Linear1D_Row),
                ],
            )

    def _shard_mlps(self, policy: dict) -> None:
        for mlp in _one_of_each_class(self._mlps()):
            if isinstance(mlp, GluMlp):
                # fc1 holds the gate and the value one after the other: [2H, D].
                split_sizes = [mlp.fc2.in_features] * 2
                inputs = [self._linear("fc1", FusedLinear1D_Col, split_sizes=split_sizes)]
            elif isinstance(mlp, SwiGLU):
                inputs = [self._linear("fc1_g", Linear1D_Col), self._linear("fc1_x", Linear1D_Col)]
            else:
                inputs = [self._linear("fc1", Linear1D_Col)]
            policy[type(mlp)] = ModulePolicyDescription(
                sub_module_replacement=[*inputs, self._linear("fc2", Linear1D_Row)]
            )

    def _replace_dropouts(self, policy: dict) -> None:
        """Draw dropout of sharded activations separately on each rank, of whole ones equally; leave p = 0 unchanged."""
        places = [
            (self._attentions(), {"attn_drop": DropoutForParallelInput, "proj_drop": DropoutForReplicatedInput}),
            (self._mlps(), {"drop1": DropoutForParallelInput, "drop2": DropoutForReplicatedInput}),
            ([("", self.model)], dict.fromkeys(("pos_drop", "head_drop"), DropoutForReplicatedInput)),
        ]
        for owners, dropouts in places:
            active = {
                (type(owner), suffix) for _, owner in owners for suffix in dropouts if getattr(owner, suffix).p > 0
            }
            for owner_class, suffix in sorted(active, key=str):
                description = SubModuleReplacementDescription(suffix, dropouts[suffix])
                self.append_or_create_submodule_replacement(description, policy, owner_class)

    def _split_backward(self, policy: dict) -> None:
        for module in _one_of_each_class(itertools.chain(self._attentions(), self._mlps())):
            names = [name for name, child in module.named_children() if type(child) is nn.Linear]
            policy[type(module)] = ModulePolicyDescription(
                sub_module_replacement=[self._linear(name, LinearWithGradAccum) for name in names]
            )

    def postprocess(self) -> nn.Module:
        stage_manager = self.pipeline_stage_manager
        if stage_manager is None or stage_manager.is_first_stage(ignore_chunk=True):
            for name, parameter in self._root_parameters.items():
                setattr(self.model, name, parameter)
            LazyInitContext.materialize(self.model)
        self._root_parameters = {}
        sum_partial_gradients(self.model, self._shapes)
        return self.model

    def get_held_layers(self) -> list[nn.Module]:
        model, stage_manager = self.model, self.pipeline_stage_manager
        held: list[nn.Module | None] = []
        if stage_manager.is_first_stage(ignore_chunk=True):
            held += [model.patch_embed, model.pos_drop, model.patch_drop, model.norm_pre]
        for start, end in stage_ranges(stage_manager, len(self.model.blocks)):
            held += model.blocks[start:end]
        # A zero-bubble schedule is V-shaped: its last chunk is back on the first stage.
        last = stage_manager.is_first_stage if stage_manager.use_zbv else stage_manager.is_last_stage
        if last(ignore_chunk=True):
            held += [model.norm, model.attn_pool, model.fc_norm, model.head_drop, model.head]
        return [module for module in held if module is not None]

    def _set_pipeline_forward(self, policy: dict) -> None:
        stage_manager = self.pipeline_stage_manager
        forward = partial(_pipeline_forward, stage_manager=stage_manager)
        if stage_manager.is_interleave:
            # The schedule passes the range of blocks of the chunk that it runs.
            stage_manager.stage_indices = stage_ranges(stage_manager, len(self.model.blocks))
        else:
            forward.keywords["stage_index"] = stage_ranges(stage_manager, len(self.model.blocks))[0]
        self.append_or_create_method_replacement({"forward": forward}, policy, type(self.model))


def _pipeline_forward(
    model: VisionTransformer,
    x: torch.Tensor | None = None,
    *rest: Any,
    stage_manager: PipelineStageManager,
    stage_index: tuple[int, int],
    hidden_states: torch.Tensor | None = None,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    **others: Any,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Run one stage of ``VisionTransformer.forward``, the blocks ``[start, end)`` of ``stage_index``. The first stage
    reads the images ``x [B, C, H, W]``, others the ``hidden_states [B, N, D]`` of the stage before. ``rest`` and
    ``others`` are elements of a micro-batch that only the criterion uses. Returns ``{"hidden_states": [B, N, D]}`` for
    the next stage, on the last stage the logits ``[B, classes]``."""
    if stage_manager.is_first_stage():
        hidden_states = model.norm_pre(model.patch_drop(model._pos_embed(model.patch_embed(x))))
    assert hidden_states is not None, "stages after the first need hidden_states"
    start, end = stage_index
    for block in model.blocks[start:end]:
        if attn_mask is not None or is_causal:
            hidden_states = block(hidden_states, attn_mask=attn_mask, is_causal=is_causal)
        elif model.grad_checkpointing and model.training:
            hidden_states = checkpoint(block, hidden_states, use_reentrant=False)
        else:
            hidden_states = block(hidden_states)
    if not stage_manager.is_last_stage():
        return {"hidden_states": hidden_states}
    return model.forward_head(model.norm(hidden_states))


def inputs_of(model: nn.Module, micro_batch: Any) -> Any:
    """The part of ``micro_batch`` that ``model`` reads: without labels if it is timm's, which takes images only, and a
    VisionTransformer would take labels for a mask. Other models are called with everything, as in a pipeline."""
    if not isinstance(model, VisionTransformer) and not hasattr(model, "default_cfg"):
        return micro_batch
    if isinstance(micro_batch, Mapping):
        return {name: value for name, value in micro_batch.items() if name in ("x", "attn_mask", "is_causal")}
    return micro_batch[0] if isinstance(micro_batch, list | tuple) else micro_batch


def stage_ranges(stage_manager: PipelineStageManager, depth: int) -> list[tuple[int, int]]:
    """Ranges of blocks ``[start, end)``, of ``depth`` in all, that this stage holds, one per model chunk."""
    given = stage_manager.num_layers_per_stage
    try:
        layers = stage_manager.distribute_layers(depth)
    except AssertionError:
        raise ValueError(
            f"num_layers_per_stage={list(given)} adds up to {sum(given)}; the model has {depth} blocks"
        ) from None
    ranges = stage_manager.get_stage_index(layers)
    return ranges if stage_manager.is_interleave else [ranges]


def _kind(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> type[nn.Module] | None:
    return next((kind for kind in kinds if isinstance(module, kind) and type(module).forward is kind.forward), None)


def _one_of_each_class(named_modules: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """One module of each class, because Colossal-AI replaces layers by class."""
    return list({type(module): module for _, module in named_modules}.values())


def _check_no_norm(name: str, norm: nn.Module, option: str, width: int) -> None:
    if not isinstance(norm, nn.Identity):
        raise ValueError(
            f"{name} is a {type(norm).__name__} over {width} features that tensor parallelism divides over "
            f"ranks, so no rank can compute its statistics; build the model with {option}=False"
        )


def _names(kinds: tuple[type, ...]) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _join(sizes: set[int] | list[int]) -> str:
    return ", ".join(str(size) for size in sorted(sizes))
