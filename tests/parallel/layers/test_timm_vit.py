"""timm's VisionTransformer computes the same under tensor parallelism as without sharding."""

import copy
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import (
    Attention,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch.nn.functional import cross_entropy

from colossal_hetero.layers import hetero_policy
from tests.support.checks import of_all_ranks, on
from tests.support.sharding import assert_same_as_unsharded, own_share, parallel_layer_counts, randomize, shard


def vit(**options: Any) -> VisionTransformer:
    """A small ViT with 12 heads of width 3: each of 2, 3 or 4 ranks has 18, 12 or 9 of its 36 features."""
    sizes = dict(img_size=8, patch_size=4, num_classes=7, embed_dim=36, depth=2, num_heads=12, mlp_ratio=4)
    torch.manual_seed(0)
    return randomize(VisionTransformer(**(sizes | options)))


def images_and_labels(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.arange(batch) % 7


def loss_of(model: VisionTransformer) -> torch.Tensor:
    images, labels = images_and_labels()
    return cross_entropy(model(images), labels)


def attention(**options: Any) -> type[Attention]:
    return type("OtherAttention", (Attention,), {"__init__": partialmethod(Attention.__init__, **options)})


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases": dict(qkv_bias=False, proj_bias=False),
    "qk_norm": dict(qk_norm=True),
    "layer scale, registers, average pool": dict(init_values=0.5, reg_tokens=2, global_pool="avg"),
    "no_embed_class, pre_norm": dict(no_embed_class=True, pre_norm=True),
    "attention pool": dict(class_token=False, global_pool="map"),
    "SwiGLU": dict(mlp_layer=SwiGLU, mlp_ratio=2),
    "packed SwiGLU": dict(mlp_layer=SwiGLUPacked, mlp_ratio=4),
    "gated attention": dict(attn_layer=attention(gated=True)),
    "wide heads": dict(attn_layer=attention(attn_head_dim=5)),
    "ResPostBlock": dict(block_fn=ResPostBlock),
    "ParallelThingsBlock": dict(block_fn=ParallelThingsBlock),
}


@on(2)
@on(3)
def loss_and_gradients_equal_those_of_the_unsharded_model() -> None:
    for name in VARIANTS if dist.get_world_size() == 2 else ("plain", "qk_norm"):
        try:
            sharded = assert_same_as_unsharded(vit(**VARIANTS[name]), loss_of)
        except Exception as error:
            raise AssertionError(f"variant {name!r}: {error}") from error
        if name == "plain":
            counts = {"HeteroFusedLinear1D_Col": 2, "HeteroLinear1D_Col": 2, "HeteroLinear1D_Row": 4}
            assert parallel_layer_counts(sharded) == counts


def _seeded_loss_of(model: VisionTransformer) -> torch.Tensor:
    torch.manual_seed(7)
    return loss_of(model)


@on(2)
def drop_path_and_patch_drop_use_the_random_numbers_of_the_unsharded_model() -> None:
    drops = dict(drop_path_rate=0.6, patch_drop_rate=0.5, depth=4)
    assert_same_as_unsharded(vit(**drops), _seeded_loss_of)
    checkpointed = vit(**drops)
    checkpointed.set_grad_checkpointing()
    assert_same_as_unsharded(checkpointed, _seeded_loss_of)


def _train_with_dropout(fused_attention: bool) -> dict[str, list[float]]:
    dropouts = ("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate", "patch_drop_rate")
    model = vit(**dict.fromkeys(dropouts, 0.3))
    for block in model.blocks:
        block.attn.fused_attn = fused_attention
    model = shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    mlp, ones = model.blocks[0].mlp, torch.ones(64)
    return {
        "losses": losses,
        "whole": [model.norm.weight.sum().item(), model.pos_embed.sum().item(), torch.rand(()).item()],
        "drop2": mlp.drop2(ones).tolist(),
        "drop1": mlp.drop1(ones).tolist(),
        "attn_drop": model.blocks[0].attn.attn_drop(ones).tolist(),
    }


@on(2, True)
@on(2, False)
def dropout_is_equal_on_replicated_features_and_differs_on_divided_ones(fused_attention: bool) -> None:
    first, second = of_all_ranks(_train_with_dropout(fused_attention))
    for name in ("losses", "whole", "drop2"):
        assert first[name] == pytest.approx(second[name], rel=1e-6), name
    assert first["losses"][0] != first["losses"][1]
    for name in ("drop1", "attn_drop"):
        assert first[name] != second[name], name


def _pipeline(**options: Any) -> list[str]:
    model = vit(reg_tokens=1, **options)
    reference = copy.deepcopy(model)
    expected = loss_of(reference)
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    policy = hetero_policy(model)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=2, precision="fp32", microbatch_size=1, custom_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, optimizer)
    batches = iter([images_and_labels()])
    # The model gets the images of a micro-batch; the labels after them are for the criterion.
    outputs = plugin.execute_pipeline(
        batches, boosted, lambda logits, batch: cross_entropy(logits, batch[1]), optimizer, return_loss=True
    )
    if outputs["loss"] is not None:
        torch.testing.assert_close(outputs["loss"].squeeze(), expected.detach(), rtol=2e-4, atol=2e-5)
    held = {name: parameter for name, parameter in model.named_parameters() if parameter is not None}
    own = {name: parameter.grad for name, parameter in held.items()}
    wanted = {name: own_share(parameter, gradients[name]) for name, parameter in held.items()}
    torch.testing.assert_close(own, wanted, rtol=2e-4, atol=2e-5)
    return sorted(held)


def _blocks(names: list[str]) -> set[int]:
    return {int(name.split(".")[1]) for name in names if name.startswith("blocks.")}


@on(4)
def tensor_parallel_stages_with_an_attention_pool_compute_the_same() -> None:
    held = of_all_ranks(_pipeline(class_token=False, global_pool="map", qk_norm=True))
    assert [_blocks(names) for names in held] == [{0}, {0}, {1}, {1}]
    assert any(name.startswith("attn_pool.mlp") for name in held[-1])
    assert [{"reg_token", "pos_embed"} <= set(names) for names in held] == [True, True, False, False]
