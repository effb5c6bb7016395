"""``hetero_policy`` replaces only the parallel linear layers of a policy."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import transformers
from colossalai.shardformer import layer as colossalai_layers
from colossalai.shardformer.policies import auto_policy
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription, Policy, SubModuleReplacementDescription
from torch import nn

from colossal_hetero.layers import hetero_policy
from colossal_hetero.layers.policy import HETERO_LAYERS
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy


class SmallPolicy(Policy):
    """A policy for a model with one layer of every kind."""

    targets = (
        *(*HETERO_LAYERS, colossalai_layers.VocabParallelEmbedding1D),
        *(colossalai_layers.LinearWithGradAccum, colossalai_layers.DropoutForParallelInput),
    )

    def config_sanity_check(self) -> None: ...

    def preprocess(self) -> nn.Module:
        return self.model

    def postprocess(self) -> nn.Module:
        return self.model

    def module_policy(self) -> dict[Any, ModulePolicyDescription]:
        replacements = [
            SubModuleReplacementDescription(f"child{index}", target, {"index": index}, index % 2 == 0)
            for index, target in enumerate(self.targets)
        ]
        return {
            nn.Linear: ModulePolicyDescription({"heads": 2}, [print], replacements, {"forward": print}),
            "ByName": ModulePolicyDescription(attribute_replacement={"heads": 2}),
        }


def test_only_the_linear_layers_are_replaced_and_the_given_policy_stays_as_it_is() -> None:
    given, table = SmallPolicy(), copy.deepcopy(auto_policy._POLICY_LIST)
    policy = hetero_policy(given)
    assert isinstance(policy, SmallPolicy) and policy is not given and type(given) is SmallPolicy
    assert type(policy).__name__ == "HeteroSmallPolicy" and type(policy) is type(hetero_policy(SmallPolicy()))
    theirs, ours = given.module_policy(), policy.module_policy()
    assert ours["ByName"] == theirs["ByName"]
    for field in ("attribute_replacement", "param_replacement", "method_replacement"):
        assert getattr(ours[nn.Linear], field) == getattr(theirs[nn.Linear], field)
    pairs = zip(theirs[nn.Linear].sub_module_replacement, ours[nn.Linear].sub_module_replacement, strict=True)
    for target, (their, our) in zip(given.targets, pairs, strict=True):
        assert their.target_module is target and our.target_module is HETERO_LAYERS.get(target, target)
        for field in ("suffix", "kwargs", "ignore_if_not_exist"):
            assert getattr(our, field) == getattr(their, field)
    assert table == auto_policy._POLICY_LIST
    sizes = dict(vocab_size=64, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    if not IS_NEWER_THAN_COLOSSALAI:
        assert not type(auto_policy.get_autopolicy(model)).__name__.startswith("Hetero")
    # Models of a newer transformers keep its forward pass.
    assert isinstance(hetero_policy(model), TransformersPolicy) == IS_NEWER_THAN_COLOSSALAI


def test_the_error_for_a_model_without_a_policy_says_what_is_valid() -> None:
    with pytest.raises(ValueError) as error:
        hetero_policy(timm.create_model("mixer_s32_224"))
    for words in (
        *("Colossal-AI has no policy for timm.models.mlp_mixer.MlpMixer", "timm VisionTransformer"),
        *("custom_policy=", "hetero_policy(MyPolicy())", "auto_policy"),
    ):
        assert words in str(error.value)
