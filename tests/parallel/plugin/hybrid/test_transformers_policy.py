"""Models whose forward pass is that of transformers itself train as in one process, divided and in pipelines; and so do
convolutional models of timm in pipelines, which are chains, also in plans of what they measure."""

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
import transformers
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.pipeline.schedule.v_schedule import PipelineGraph
from timm.layers import ClassifierHead
from timm.models.vgg import VGG, ConvMlp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from colossal_hetero import HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.layers import hetero_layers, hetero_policy
from colossal_hetero.layers.chain import Chain, links_of
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI, TransformersPolicy
from colossal_hetero.profiling.layer_profiler import profile_layers
from tests.support.checks import if_thorough, of_all_ranks, on
from tests.support.machines import Nodes, machines
from tests.support.model_families import BUILDERS, Inputs, family_loss
from tests.support.sharding import assert_same_as_unsharded, own_share, randomize, shard
from tests.support.training import batch, boost, load_checkpoint, pipeline_step, save_checkpoint, sgd, train_alone

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
PIPELINES = (*DECODERS, "bert", *(("vit",) if IS_NEWER_THAN_COLOSSALAI else ()))
FAMILIES = (*PIPELINES, "t5", "whisper")
STEPS = 2


@on(2)
@on(4)
def divided_models_have_the_gradients_of_the_whole_ones() -> None:
    for family in FAMILIES if dist.get_world_size() == 2 else ("llama", "bert", "t5", "whisper"):
        model, inputs = BUILDERS[family]()
        options = dict(policy=hetero_policy(TransformersPolicy(randomize(model))), make_vocab_size_divisible_by=16)
        sharded = assert_same_as_unsharded(model, family_loss(inputs), **options)
        assert hetero_layers(sharded), f"no layer of {family} is divided"


CONFIGURED: dict[str, dict[str, int]] = {
    "Cohere": dict(num_key_value_heads=4),
    "Exaone4": dict(num_key_value_heads=4),
    "Gemma2": dict(num_key_value_heads=4, head_dim=8),
    "Gemma3Text": dict(num_key_value_heads=4, head_dim=8),
    "Glm": dict(num_key_value_heads=4, head_dim=8),
    "GptOss": dict(num_key_value_heads=4),
    "Granite": dict(num_key_value_heads=4),
    "Olmo2": dict(num_key_value_heads=4),
    "Phi3": dict(num_key_value_heads=8),
    "SmolLM3": dict(num_key_value_heads=4),
    "Starcoder2": dict(num_key_value_heads=4),
}
"""Models that are divided as their own configuration says."""
TOKENS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


@on(2)
def models_divided_as_their_configuration_says_have_the_gradients_of_the_whole_ones() -> None:
    if not IS_NEWER_THAN_COLOSSALAI:
        return  # plans of configurations are used from transformers 5 on
    tokens = torch.randint(0, 128, (3, 6), generator=torch.Generator().manual_seed(1))
    sizes = dict(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8)
    for name, options in CONFIGURED.items():
        config = getattr(transformers, f"{name}Config")(**sizes, **TOKENS, **options)
        model = randomize(getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config))
        loss_of = family_loss(dict(input_ids=tokens, labels=tokens))
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_same_as_unsharded(model, loss_of, make_vocab_size_divisible_by=16)


@on(2)
def what_cannot_be_divided_is_refused() -> None:
    sizes = dict(vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, ffn_dim=48, word_embed_proj_dim=32))
    with pytest.raises(ValueError, match="has no plan that divides OPTForCausalLM over ranks; use tp_size=1"):
        shard(opt, TransformersPolicy(opt))
    with pytest.raises(ValueError, match=r"OPTForCausalLM of transformers .* cannot be cut into pipeline stages"):
        boost(HeteroHybridParallelPlugin(1, 2, num_microbatches=2, custom_policy=TransformersPolicy(opt)), opt, sgd)
    llama, _ = BUILDERS["llama"]()
    llama.config.num_key_value_heads = 3
    with pytest.raises(ValueError, match=r"tp_size=2 does not divide num_key_value_heads=3 .* valid tp sizes: 1"):
        shard(llama, TransformersPolicy(llama))
    with pytest.raises(ValueError, match="sequence parallelism of LlamaForCausalLM needs Colossal-AI's own passes"):
        shard(llama, TransformersPolicy(llama), enable_sequence_parallelism=True, sequence_parallelism_mode="ring")
    if IS_NEWER_THAN_COLOSSALAI:
        mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, intermediate_size=48))
        with pytest.raises(ValueError, match=r"cannot divide .*gate_up_proj of MixtralForCausalLM"):
            shard(mixtral, TransformersPolicy(mixtral))


def deep(family: str, tied: bool) -> tuple[nn.Module, Inputs]:
    model, inputs = BUILDERS[family]()
    config = model.config
    setattr(config, {"gpt2": "n_layer"}.get(family, "num_hidden_layers"), 5)
    if hasattr(config, "layer_types"):
        config.layer_types = None
    config = type(config)(**(config.to_diff_dict() | dict(tie_word_embeddings=tied)))
    inputs = {name: value.repeat(2, *[1] * (value.dim() - 1))[:4] for name, value in inputs.items()}
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    return randomize(type(model)(config)).double(), inputs


def loss_of(outputs: Any, inputs: Inputs) -> Tensor:
    return cross_entropy(outputs["logits"].flatten(0, -2), inputs["labels"].flatten())


def trained(family: str, tied: bool, **options: Any) -> None:
    model, inputs = deep(family, tied)
    alone, _ = deep(family, tied)
    batches = [inputs] * STEPS
    expected = train_alone(alone, sgd(alone), batches, lambda whole, batch: loss_of(whole(**batch), batch))
    assert expected[0] != expected[-1]
    plugin = HeteroHybridParallelPlugin(
        **(dict(precision="fp32", num_microbatches=4, zero_stage=0, max_norm=0.0) | options),
        custom_policy=hetero_policy(TransformersPolicy(model)),
    )
    run = boost(plugin, model, sgd)
    losses = [pipeline_step(run, iter([batch]), loss_of) for batch in batches]
    if plugin.is_last_stage():
        torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0, msg=lambda text: f"{family}, loss: {text}")
    wholes = dict(alone.named_parameters(remove_duplicate=False))
    tolerance = 1e-5 if plugin.zero_stage else 1e-9  # ZeRO's parameters are fp32
    for name, parameter in run.model.unwrap().named_parameters():
        whole = own_share(parameter, wholes[name]).to(parameter.dtype)
        message = partial("{}, {}: {}".format, family, name)
        torch.testing.assert_close(parameter, whole, rtol=tolerance, atol=tolerance * 1e-2, msg=message)


GRAPH = PipelineGraph(n_stage=2, n_micro=4, f_cost=1, b_cost=1, w_cost=1, c_cost=1, f_mem=2, b_mem=-1, w_mem=-1)
ZERO_BUBBLE = dict(pp_style="zbv", num_model_chunks=2, scheduler_nodes=GRAPH.get_v_schedule())


SOME = (("llama", False), ("gpt2", True), ("bert", True))
"""Families, and whether their embedding and head have one weight."""
EVERY = (*((family, False) for family in PIPELINES), ("llama", True), *SOME[1:])


@on(2, EVERY, dict(tp_size=1, pp_size=2))
@on(2, SOME, dict(tp_size=1, pp_size=2, **ZERO_BUBBLE))
@on(2, SOME, dict(tp_size=1, pp_size=2, pp_style="interleaved", num_model_chunks=2))
@on(3, SOME, dict(tp_size=1, pp_size=3, num_layers_per_stage=[1, 3, 1]))
@on(4, SOME, dict(tp_size=2, pp_size=2))  # divided, all families are compared above
@if_thorough(4, EVERY, dict(tp_size=2, pp_size=2))
@on(4, SOME, dict(tp_size=1, pp_size=2, zero_stage=1))
def pipelines_train_as_one_process(models: tuple[tuple[str, bool], ...], options: dict[str, Any]) -> None:
    for family, tied in models:
        if family == "gpt2" and "scheduler_nodes" in options:
            with pytest.raises(ValueError, match=r"the zero-bubble schedule needs layers that .* GPT2LMHeadModel"):
                trained(family, tied, **options)
        else:
            trained(family, tied, **options)


@on(2)
def checkpoints_are_read_again(folder: Path) -> None:
    """Colossal-AI reads what it saved with the ``torch.load`` of this version, which may read weights only."""
    for family, options in (("gpt2", dict(tp_size=2, pp_size=1)), ("llama", dict(tp_size=1, pp_size=2))):
        batch = deep(family, False)[1]

        def started(family: str = family, options: dict[str, Any] = options) -> tuple[Any, Any]:
            model, _ = deep(family, False)
            plugin = HeteroHybridParallelPlugin(
                **options, precision="fp32", num_microbatches=4, custom_policy=hetero_policy(TransformersPolicy(model))
            )
            run = boost(plugin, model)
            return run, CosineAnnealingWarmupLR(run.optimizer.optim, 10, 2)

        def step(run: Any, scheduler: Any, batch: Inputs = batch) -> float | None:
            loss = pipeline_step(run, iter([batch]), loss_of)
            scheduler.step()
            return loss

        run, scheduler = started()
        step(run, scheduler)
        for sharded in (False, True):
            save_checkpoint(run, folder / f"{family}-{sharded}", sharded)
            run.booster.save_lr_scheduler(scheduler, str(folder / f"{family}-{sharded}" / "scheduler"))
        dist.barrier()
        expected = [step(run, scheduler) for _ in range(2)]
        for sharded in (False, True):
            again, scheduler = started()
            load_checkpoint(again, folder / f"{family}-{sharded}", sharded)
            again.booster.load_lr_scheduler(scheduler, str(folder / f"{family}-{sharded}" / "scheduler"))
            assert [step(again, scheduler) for _ in range(2)] == expected, f"{family}, shard={sharded}"


# Chains --------------------------------------------------------------------------------------------------------------


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
