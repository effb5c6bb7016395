"""Pipelines of timm's models that are chains of modules, such as VGG, ConvNeXt, ResNet or EfficientNet. The model, its
``Sequential`` modules and those that have some are unrolled (ADAPT, chapter 6) as long as one pass shows that each
child takes exactly what the child before returns. The chain is cut before modules with weights of two or more
dimensions: norms, activations and pooling, which may work in place, stay with what comes before them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from colossalai.pipeline.stage_manager import PipelineStageManager
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from .timm_vit import stage_ranges

Link = tuple[nn.Module, ...]
"""Consecutive modules of a chain that stay together."""


class Chain(nn.Module):
    """A model as a row of its links, which it shares."""

    def __init__(self, links: tuple[Link, ...]) -> None:
        super().__init__()
        self.links = nn.ModuleList(nn.Sequential(*link) for link in links)

    def forward(self, images: Tensor) -> Tensor:
        for link in self.links:
            images = link(images)
        return images


def links_of(model: nn.Module) -> tuple[Link, ...] | None:
    """The links of a timm model; None for other models, vision transformers, and those that are no chain of two."""
    if not hasattr(model, "default_cfg") or isinstance(model, VisionTransformer):
        return None
    links: list[Link] = []
    for module in _unrolled(model, model, _calls(model)):
        if not links or any(parameter.dim() > 1 for parameter in module.parameters()):
            links.append((module,))
        else:
            links[-1] += (module,)
    owned = {parameter for link in links for module in link for parameter in module.parameters()}
    return tuple(links) if len(links) > 1 and owned == set(model.parameters()) else None


class ModuleCall:
    """One call of a module: its only argument, its output, and how often each was changed in place until then."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.argument = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
        self.changes = 0 if self.argument is None else self.argument._version
        self.output: Any = None
        self.output_changes = 0

    def returns(self, output: Any) -> None:
        self.output, self.output_changes = output, getattr(output, "_version", 0)

    def follows(self, argument: Tensor | None, changes: int) -> bool:
        return argument is not None and self.argument is argument and self.changes == changes


def _calls(model: nn.Module) -> list[ModuleCall]:
    """All calls of modules in one pass over images of the model's own size, without computing."""
    found: list[ModuleCall] = []
    running: list[ModuleCall] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(ModuleCall(module, args, kwargs))
        found.append(running[-1])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        running.pop().returns(output)

    modules, modes = list(model.modules()), [module.training for module in model.modules()]
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    model.train()  # as a pipeline trains; dropout that does nothing in evaluation would look like a chain
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tensors = {
                name: torch.empty(tensor.shape, dtype=tensor.dtype)
                for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            }
            images = torch.empty(2, *model.default_cfg["input_size"], dtype=next(model.parameters()).dtype)
            torch.func.functional_call(model, tensors, (images,))
    except Exception:  # the model depends on values, or takes something else than images
        return []
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return found


def _unrolled(root: nn.Module, module: nn.Module, calls: list[ModuleCall]) -> Iterator[nn.Module]:
    """``module`` as the chain of its children, these unrolled too; the module itself if it is no chain."""
    children = list(module.children())
    own = [call for call in calls if call.module is module]
    may_unroll = (
        module is root
        or isinstance(module, nn.Sequential)
        or any(isinstance(child, nn.Sequential) for child in children)
    )
    inner = [call for call in calls if any(call.module is child for child in children)]
    if not may_unroll or not inner or len(own) != 1 or len({id(call.module) for call in inner}) != len(inner):
        yield module
        return
    argument, changes = own[0].argument, own[0].changes
    for call in inner:
        if not call.follows(argument, changes):
            yield module
            return
        argument, changes = call.output, call.output_changes
    if argument is not own[0].output or changes != own[0].output_changes:
        yield module
        return
    for call in inner:
        yield from _unrolled(root, call.module, calls)


class ChainPolicy(Policy):
    """Cuts a timm model that is a chain into pipeline stages between its links, which ``num_layers_per_stage`` counts.
    A micro-batch is a tensor of images, a tuple that begins with it, or a dict with the images as ``x``."""

    def __init__(self, links: tuple[Link, ...]) -> None:
        super().__init__()
        self._links = links

    def config_sanity_check(self) -> None:
        config, kind = self.shard_config, type(self.model).__name__
        if config.tensor_parallel_size > 1:
            raise ValueError(
                f"tensor parallelism cannot divide the layers of {kind}; use tp_size=1, with a pipeline or replicas"
            )
        stage_manager = config.pipeline_stage_manager
        if stage_manager is not None and stage_manager.is_interleave:
            raise ValueError(
                f"stages of {kind} send messages of different sizes, which only the 1F1B schedule can do; use "
                'pp_style="1f1b"'
            )

    def preprocess(self) -> nn.Module:
        return self.model

    def postprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        policy: dict[str | type[nn.Module], ModulePolicyDescription] = {}
        if self.pipeline_stage_manager is not None:
            forward = partial(
                _pipeline_forward, stage_manager=self.pipeline_stage_manager, modules=self.get_held_layers()
            )
            self.append_or_create_method_replacement({"forward": forward}, policy, type(self.model))
        return policy

    def get_held_layers(self) -> list[nn.Module]:
        ((start, end),) = stage_ranges(self.pipeline_stage_manager, len(self._links))
        return [module for link in self._links[start:end] for module in link]


def _pipeline_forward(
    model: nn.Module,
    x: Tensor | None = None,
    *rest: Any,
    stage_manager: PipelineStageManager,
    modules: list[nn.Module],
    hidden_states: Tensor | None = None,
    **others: Any,
) -> Tensor | dict[str, Tensor]:
    hidden = x if stage_manager.is_first_stage() else hidden_states
    assert hidden is not None, "stages after the first need hidden_states"
    for module in modules:
        hidden = module(hidden)
    return hidden if stage_manager.is_last_stage() else {"hidden_states": hidden}
