"""Any policy of Colossal-AI, with its parallel linear layers replaced by those of this package. ``module_policy()``
names the layers that replace submodules of each module class, so one exchange of names works for every model family."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

from colossalai.shardformer._utils import getattr_
from colossalai.shardformer.policies.auto_policy import get_autopolicy
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy
from peft.tuners.tuners_utils import BaseTunerLayer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from transformers import PreTrainedModel

from .chain import ChainPolicy, links_of
from .linear import HETERO_LAYERS
from .partial_gradients import Shapes, shapes_of, sum_partial_gradients
from .timm_vit import TimmViTPolicy
from .transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy, plan_of


class _HeteroPolicy(Policy):
    """Base class before a policy's class: replaces layers, and sums gradients of which each rank has a part."""

    _shapes: Shapes

    def preprocess(self) -> nn.Module:
        model = super().preprocess()
        self._shapes = shapes_of(model)
        return model

    def postprocess(self) -> nn.Module:
        model = super().postprocess()
        if not isinstance(self, TimmViTPolicy):  # which does so itself
            sum_partial_gradients(model, self._shapes)
        return model

    def module_policy(self) -> dict[str | type[nn.Module], ModulePolicyDescription]:
        policy = super().module_policy()
        for module in self.model.modules() if isinstance(self.model, nn.Module) else ():
            for key in (type(module), type(module).__name__):
                if key in policy:
                    _check_weights(module, policy[key])
        return {key: _replace_layers(description) for key, description in policy.items()}


def _check_weights(module: nn.Module, description: ModulePolicyDescription) -> None:
    """Raise ValueError if a submodule that is to be replaced computes its weight from other parameters."""
    for replacement in description.sub_module_replacement or ():
        layer = getattr_(module, replacement.suffix, ignore=True)
        if not isinstance(layer, nn.Module) or isinstance(layer, BaseTunerLayer):  # adapters are refused elsewhere
            continue
        for name in ("weight", "bias"):
            if isinstance(getattr(layer, name, None), Tensor) and name not in layer._parameters:
                raise ValueError(
                    f"the {name} of {replacement.suffix} in {type(module).__name__} is no parameter, but computed from "
                    "others (a parametrization such as weight_norm or spectral_norm, or torch.nn.utils.prune). "
                    "Tensor-parallel layers have plain weights: make it one before booster.boost "
                    "(torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove)"
                )


def _replace_layers(description: ModulePolicyDescription) -> ModulePolicyDescription:
    if not description.sub_module_replacement:
        return description
    return dataclasses.replace(
        description,
        sub_module_replacement=[
            dataclasses.replace(
                replacement, target_module=HETERO_LAYERS.get(replacement.target_module, replacement.target_module)
            )
            for replacement in description.sub_module_replacement
        ],
    )


@cache
def _hetero_class(policy_class: type[Policy]) -> type[Policy]:
    namespace: dict[str, Any] = {"__module__": __name__, "__doc__": policy_class.__doc__}
    return type(f"Hetero{policy_class.__name__}", (_HeteroPolicy, policy_class), namespace)


def hetero_policy(model_or_policy: nn.Module | Policy) -> Policy:
    """Return a policy that shards a model with this package's linear layers.

    Use it in ``HybridParallelPlugin(custom_policy=hetero_policy(model))`` and with ``ShardFormer.optimize``. Its class
    is a subclass of the original policy's. A given policy is not changed; a policy from this function is returned as it
    is.

    Args:
        model_or_policy: a model that Colossal-AI has a policy for, a timm ``VisionTransformer`` or chain of
            modules (:mod:`.chain`), or any policy.

    Raises:
        ValueError: Colossal-AI has no policy for the model.
    """
    if isinstance(model_or_policy, Policy):
        policy = model_or_policy
    elif isinstance(model_or_policy, VisionTransformer):
        policy = TimmViTPolicy()
    elif (links := links_of(model_or_policy)) is not None:
        policy = ChainPolicy(links)
    elif IS_NEWER_THAN_COLOSSALAI and isinstance(model_or_policy, PreTrainedModel):
        policy = TransformersPolicy(model_or_policy)
    else:
        policy = _auto_policy(model_or_policy)
    if isinstance(policy, _HeteroPolicy):
        return policy
    policy = copy.copy(policy)
    policy.__class__ = _hetero_class(type(policy))  # type: ignore[arg-type]  # mypy takes classes for unhashable
    return policy


def _auto_policy(model: nn.Module) -> Policy:
    try:
        return get_autopolicy(model)
    except NotImplementedError as error:
        if isinstance(model, PreTrainedModel) and plan_of(model).styles:
            return TransformersPolicy(model)
        name = f"{type(model).__module__}.{type(model).__qualname__}"
        raise ValueError(
            f"Colossal-AI has no policy for {name}. Valid are a model for which it has one (listed in "
            "colossalai.shardformer.policies.auto_policy), a timm VisionTransformer, or a policy: "
            "hetero_policy(MyPolicy()), or custom_policy=MyPolicy() as the plugin's argument."
        ) from error
