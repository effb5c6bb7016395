"""Pipelines of convolutional models of timm, compared with one process, and plans of what they measure."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import timm
import torch
from timm.layers import ClassifierHead
from timm.models.vgg import VGG, ConvMlp
from torch import nn
from torch.nn.functional import cross_entropy

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.layers.chain import Chain, links_of
from colossal_hetero.profiling.layer_profiler import profile_layers
from tests.support.harness import run_ranks
from tests.support.machines import Nodes, machines
from tests.support.training import batch, boost, pipeline_step, sgd, train_alone

SIZES = {"vgg": 6, "convnext": 10}
"""Links of the models below."""


def make_model(name: str) -> nn.Module:
    torch.manual_seed(3)
    if name == "vgg":
        model: Any = VGG([6, "M", 8, 10, "M", 12], num_classes=7)
        model.pre_logits, model.head = ConvMlp(12, 9, drop_rate=0.0), ClassifierHead(9, 7)  # timm's are 4,096 wide
        model.default_cfg = {"input_size": (3, 32, 32)}
        return model.double()
    return timm.create_model("convnext_atto", num_classes=7, dims=(6, 8, 10, 12), depths=(1, 1, 2, 1)).double()


def images(number: int, size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return batch(number, size=size)[0].double().repeat(1, 1, 4, 4), batch(number, size=size)[1]


def train(name: str, options: dict[str, Any]) -> dict[str, Any]:
    plugin = HeteroHybridParallelPlugin(precision="fp32", **options)
    run = boost(plugin, make_model(name), sgd)
    size = 6 if plugin.plan is None else plugin.plan.global_batch
    losses = [pipeline_step(run, iter([images(number, size)])) for number in range(3)]
    return {"losses": losses, "weights": run.parameters, "last": plugin.is_last_stage()}


def check(name: str, results: Sequence[dict[str, Any]], size: int = 6) -> None:
    alone = make_model(name)
    losses = train_alone(alone, sgd(alone), [images(number, size) for number in range(3)])
    expected = dict(alone.named_parameters())
    seen = set()
    for result in results:
        if result["last"]:
            assert result["losses"] == pytest.approx(losses, rel=1e-6)
        for key, value in result["weights"].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)
            seen.add(key)
    assert seen == set(expected)


@pytest.mark.parametrize(("name", "layers"), [("vgg", [2, 4]), ("convnext", [1, 5, 4]), ("vgg", [1, 1, 3, 1])])
def test_a_chain_trains_in_a_pipeline(name: str, layers: list[int]) -> None:
    options = dict(tp_size=1, pp_size=len(layers), num_layers_per_stage=layers, microbatch_size=1)
    check(name, run_ranks(len(layers), train, name, options))


def profile_and_train(name: str) -> dict[str, Any]:
    sample = images(0, 1)
    profile = profile_layers(make_model(name), sample, cross_entropy, micro_batches=(1, 2), min_seconds=0).profile
    cluster = machines(Nodes("Ethernet", [1, 1]), device=profile.devices[0])
    planning = PlanConfig(cluster=cluster, profile=profile, global_batch_size=8)
    return train(name, dict(plan="auto", planning=planning, pp_size=2)) | {"profile": profile}


def test_a_chain_is_measured_and_planned() -> None:
    results = run_ranks(2, profile_and_train, "convnext")
    check("convnext", results, 8)
    profile = results[0]["profile"]
    assert profile.blocks == SIZES["convnext"] and len(set(profile.sizes[0].output_bytes)) > 3


@pytest.mark.parametrize(
    ("name", "count"),
    [("resnet10t", 8), ("convnext_atto", 17), ("mobilenetv3_small_050", 15), ("regnetx_002", 6), ("mixer_s32_224", 0)],
)
def test_links_compute_what_the_model_does(name: str, count: int) -> None:
    """Blocks with a shortcut stay whole, also where it is added in place; some models are no chain."""
    model = timm.create_model(name, num_classes=7)
    links = links_of(model)
    assert len(links or ()) == count
    if links is not None:
        inputs = images(0, 2)[0].float()
        expected = copy.deepcopy(model)(inputs)
        assert torch.equal(Chain(links)(inputs), expected)


class AddsInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (3, 8, 8)}
        self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.first(images)
        hidden += images
        return self.second(hidden)


def test_a_tensor_that_is_changed_between_modules_breaks_a_chain() -> None:
    assert links_of(AddsInPlace()) is None
