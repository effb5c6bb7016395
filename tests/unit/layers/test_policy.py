"""``hetero_policy`` replaces only the parallel linear layers of a policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import transformers
from colossalai.shardformer import layer as colossalai_layers
from colossalai.shardformer.policies import auto_policy
from colossalai.shardformer.policies.base_policy import (
    ModulePolicyDescription,
    Policy,
    SubModuleReplacementDescription,
)
from torch import nn

from colossal_hetero.layers import HeteroLinear1D_Col, hetero_policy
from colossal_hetero.layers.policy import HETERO_LAYERS
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy


class SmallPolicy(Policy):
    """A policy for a model with one layer of every kind."""

    targets = (
        *HETERO_LAYERS,
        colossalai_layers.VocabParallelLMHead1D,
        colossalai_layers.VocabParallelEmbedding1D,
        colossalai_layers.LinearWithGradAccum,
        colossalai_layers.DropoutForParallelInput,
    )

    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> nn.Module:
        return self.model

    def postprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        replacements = [
            SubModuleReplacementDescription(
                f"child{index}", target, {"index": index}, ignore_if_not_exist=index % 2 == 0
            )
            for index, target in enumerate(self.targets)
        ]
        return {
            nn.Linear: ModulePolicyDescription({"heads": 2}, [print], replacements, {"forward": print}),
            "ByName": ModulePolicyDescription(attribute_replacement={"heads": 2}),
        }


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.LlamaForCausalLM(config)


def test_only_the_six_linear_layers_are_replaced():
    theirs = SmallPolicy().module_policy()
    ours = hetero_policy(SmallPolicy()).module_policy()
    assert ours["ByName"] == theirs["ByName"]
    for field in ("attribute_replacement", "param_replacement", "method_replacement"):
        assert getattr(ours[nn.Linear], field) == getattr(theirs[nn.Linear], field)
    pairs = zip(theirs[nn.Linear].sub_module_replacement, ours[nn.Linear].sub_module_replacement, strict=True)
    for their, our in pairs:
        assert our.target_module is HETERO_LAYERS.get(their.target_module, their.target_module)
        assert (our.suffix, our.kwargs, our.ignore_if_not_exist) == (
            their.suffix,
            their.kwargs,
            their.ignore_if_not_exist,
        )


def test_the_result_keeps_the_class_and_the_attributes_of_the_policy():
    given = SmallPolicy()
    given.targets = (colossalai_layers.Linear1D_Col,)
    policy = hetero_policy(given)
    assert isinstance(policy, SmallPolicy)
    assert type(policy).__name__ == "HeteroSmallPolicy"
    assert type(policy) is type(hetero_policy(SmallPolicy()))
    (replacement,) = policy.module_policy()[nn.Linear].sub_module_replacement
    assert replacement.target_module is HeteroLinear1D_Col


def test_the_given_policy_and_the_table_of_colossalai_are_not_changed():
    given, table = SmallPolicy(), copy.deepcopy(auto_policy._POLICY_LIST)
    policy = hetero_policy(given)
    assert policy is not given
    assert type(given) is SmallPolicy
    assert [r.target_module for r in given.module_policy()[nn.Linear].sub_module_replacement] == list(given.targets)
    assert table == auto_policy._POLICY_LIST
    if not IS_NEWER_THAN_COLOSSALAI:
        assert not type(auto_policy.get_autopolicy(_llama())).__name__.startswith("Hetero")


def test_models_of_a_newer_transformers_keep_its_forward_pass():
    policy = hetero_policy(_llama())
    assert isinstance(policy, TransformersPolicy) == IS_NEWER_THAN_COLOSSALAI


def test_the_error_for_a_model_without_a_policy_says_what_is_valid():
    with pytest.raises(ValueError) as error:
        hetero_policy(timm.create_model("mixer_s32_224"))
    message = str(error.value)
    assert "Colossal-AI has no policy for timm.models.mlp_mixer.MlpMixer" in message
    for remedy in ("timm VisionTransformer", "custom_policy=", "hetero_policy(MyPolicy())", "auto_policy"):
        assert remedy in message
