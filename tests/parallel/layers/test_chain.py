"""Pipelines of convolutional models of timm, compared with one process, and plans of what they measure."""

import copy
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
from tests.support.checks import of_all_ranks, on
from tests.support.machines import Nodes, machines
from tests.support.training import batch, boost, pipeline_step, sgd, train_alone


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


def train_in_a_pipeline(name: str, size: int = 6, **options: Any) -> None:
    run = boost(HeteroHybridParallelPlugin(precision="fp32", **options), make_model(name), sgd)
    alone = make_model(name)
    expected = train_alone(alone, sgd(alone), [images(number, size) for number in range(3)])
    losses = [pipeline_step(run, iter([images(number, size)])) for number in range(3)]
    if run.plugin.is_last_stage():
        assert losses == pytest.approx(expected, rel=1e-6)
    weights = dict(alone.named_parameters())
    torch.testing.assert_close(run.parameters, {key: weights[key] for key in run.parameters}, rtol=1e-9, atol=1e-12)
    assert set().union(*of_all_ranks(set(run.parameters))) == set(weights)


@on(2, "vgg", [2, 4])
@on(3, "convnext", [1, 5, 4])
@on(4, "vgg", [1, 1, 3, 1])
def a_chain_trains_in_a_pipeline(name: str, layers: list[int]) -> None:
    options = dict(tp_size=1, pp_size=len(layers), num_layers_per_stage=layers, microbatch_size=1)
    train_in_a_pipeline(name, **options)


@on(2)
def a_chain_is_measured_and_planned() -> None:
    sample = images(0, 1)
    model = make_model("convnext")
    profile = profile_layers(model, sample, cross_entropy, micro_batches=(1, 2), min_seconds=0).profile
    assert profile.blocks == 10 and len(set(profile.sizes[0].output_bytes)) > 3
    cluster = machines(Nodes("Ethernet", [1, 1]), device=profile.devices[0])
    planning = PlanConfig(cluster=cluster, profile=profile, global_batch_size=8)
    train_in_a_pipeline("convnext", 8, plan="auto", planning=planning, pp_size=2)


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
