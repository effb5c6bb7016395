"""Each model family of Colossal-AI has the loss and gradients of its unsharded model, also while a rank migrates, with
dropout inside of blocks, and with trained parameters inside of them; and so has timm's VisionTransformer."""

import copy
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from timm.layers import SwiGLU, SwiGLUPacked
from timm.models.vision_transformer import Attention, ParallelThingsBlock, ResPostBlock, VisionTransformer
from torch import nn
from torch.nn.functional import cross_entropy

from colossal_hetero import BalanceConfig
from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.host_messages import Exchange
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.balance.resharding import Resharding
from colossal_hetero.layers import hetero_layers, hetero_policy
from colossal_hetero.layers.block import Block, _has_dropout, attach_blocks
from colossal_hetero.layers.block_rules import rule_for
from colossal_hetero.layers.dropout import UnitDropout
from colossal_hetero.layers.transformers_policy import IS_NEWER_THAN_COLOSSALAI
from colossal_hetero.layers.transport import Transport
from colossal_hetero.layers.unit_layout import UnitRange
from colossal_hetero.layers.workload import Surrounded
from tests.support import sharding
from tests.support.checks import of_all_ranks, on
from tests.support.language_models import plan_of
from tests.support.model_families import BUILDERS, SHARDING_OPTIONS, UNLIKE_THE_UNSHARDED_MODEL, allow_cpu, family_loss
from tests.support.random_examples import IS_THOROUGH
from tests.support.sharding import Prepare, assert_same_as_unsharded, own_share, parallel_layer_counts, randomize, shard

COLUMN_FORMS = ("broadcast-reduce", "scatter-gather")


class NoOptimizer:
    obstacle = None

    def prepare(self) -> None: ...

    def slots_of(self, parameter: torch.Tensor) -> list[Any]:
        return []


class Migration:
    """Changes the plan of a sharded model before each run: block form, a column form, and units moved for good."""

    def __init__(self, number: int, blocks_only: bool = False) -> None:
        self.loose = self.immovable = 0
        """Numbers of layers that are in no block, and of blocks of one unit, which cannot be divided."""
        self._number, self._blocks_only = number, blocks_only
        self._method, self._has_run = "", False
        self._applier: Any = None
        self._transport: Any = None

    def cases(self) -> Iterator[Prepare]:
        number, both = self._number, (0, 1)
        if not self._blocks_only:
            yield lambda model: None
            forms = product(COLUMN_FORMS, both) if IS_THOROUGH else [(COLUMN_FORMS[number % 2], number % 4 // 2)]
            yield from (partial(self._migrate, method, sender) for method, sender in forms)
        for sender in both if IS_THOROUGH else both[number % 2 :] if self._blocks_only else (1 - number % 2,):
            yield partial(self._migrate, "block", sender)
        if not self._blocks_only:
            yield partial(self._migrate, "block", number % 2, for_good=True)

    def finish(self) -> None:
        assert sum(sent.messages for sent in self._transport.sent.values()) > 0, f"{self._method} sent nothing"

    def _migrate(self, method: str, sender: int, model: nn.Module, for_good: bool = False) -> Callable[[], None] | None:
        """Returns what gives all ranks their own units again, with their gradients, if units are moved for good."""
        if self._has_run:
            self._applier.end_iteration()
            self.finish()
        self._has_run = True
        if method != self._method:
            self.attach(method, model)
        self._transport.reset()
        self._applier.apply(plan_of(sender, 2), for_good)
        if not for_good:
            self._transport.reset()
        self._applier.units.begin_pass()
        if not for_good:
            return None
        assert self._resharding is not None and self._resharding.is_active
        return partial(self._applier.apply, BalancePlan.idle(2))

    def attach(self, method: str, model: nn.Module) -> list[Block]:
        """Let later runs migrate with ``method``; returns the blocks."""
        if self._applier is not None:
            self._applier.apply(BalancePlan.idle(2))
        layers = hetero_layers(model)
        blocks = attach_blocks(model) if method == "block" else []
        self.loose = len(layers) - sum(len(block.layers) for block in blocks)
        self.immovable = sum(block.units == 1 for block in blocks)
        self._method, self._transport = method, Transport(dist.new_group([0, 1]))
        config = BalanceConfig(mode="migrate", migration=method)  # type: ignore[arg-type]
        self._resharding = None
        if blocks:
            exchange = Exchange(dist.new_group([0, 1]))
            self._resharding = Resharding(model, blocks, self._transport, exchange, NoOptimizer())
        self._applier = Applier(layers, blocks, config, 100, self._transport, resharding=self._resharding)
        return blocks


def check_each(check: Callable[[str, int], Any], expected: dict[str, Any]) -> None:
    allow_cpu()
    for number, name in enumerate(name for name in expected if name in BUILDERS):
        torch.manual_seed(0)
        try:
            assert check(name, number) == expected[name]
        except Exception as error:
            error.add_note(f"in {name}")
            raise


def _layers(loose: int, columns: int, rows: int, head: int = 1, fused: int = 0) -> tuple[dict[str, int], int, int]:
    counts = dict(HeteroLinear1D_Col=columns, HeteroLinear1D_Row=rows, HeteroFusedLinear1D_Col=fused)
    counts["HeteroVocabParallelLMHead1D"] = head
    return {name: count for name, count in counts.items() if count}, loose, 0


FAMILIES: dict[str, tuple[dict[str, int], int, int]] = {
    "bert": _layers(1, 8, 4),
    "gpt2": (
        dict(HeteroGPT2FusedLinearConv1D_Col=4, HeteroGPT2FusedLinearConv1D_Row=4, HeteroVocabParallelLMHead1D=1),
        *(1, 0),
    ),
    "gptj": _layers(1, 8, 4),
    "llama": _layers(1, 10, 4),
    "mistral": _layers(1, 10, 4),
    "mixtral": _layers(3, 9, 2, head=0),
    "qwen2": _layers(1, 11, 4, head=0),
    "qwen3": _layers(1, 10, 4),
    "cohere": _layers(1, 10, 4),
    "opt": _layers(1, 8, 4),
    "bloom": _layers(5, 4, 4),
    "falcon": _layers(1, 4, 4),
    "falcon_alibi": _layers(5, 4, 4),
    "t5": _layers(25, 22, 10),
    "vit": _layers(1, 9, 4, head=0),
    "whisper": _layers(1, 22, 10),
    "sam": _layers(32, 25, 13, head=0, fused=2),
    "blip2": _layers(1, 24, 14, fused=2),
}
"""Of each family: how many of Colossal-AI's layers this package's replace; how many are in no block: heads, single
layers, attention with a bias per head (T5, BLOOM, Falcon with ALiBi, SAM); and blocks that cannot be divided."""
if IS_NEWER_THAN_COLOSSALAI:
    FAMILIES |= dict(qwen2=_layers(1, 10, 4), vit=_layers(0, 8, 4, head=0))


def check_family(name: str, number: int) -> tuple[dict[str, int], int, int]:
    compare = sharding.assert_same_as_colossalai if name in UNLIKE_THE_UNSHARDED_MODEL else assert_same_as_unsharded
    (model, inputs), migration = BUILDERS[name](), Migration(number)
    options = SHARDING_OPTIONS.get(name, {})
    sharded = compare(randomize(model).train(), family_loss(inputs), migration.cases(), **options)
    migration.finish()
    return parallel_layer_counts(sharded), migration.loose, migration.immovable


@on(2)
def loss_and_gradients_equal_those_of_the_unsharded_model() -> None:
    assert set(FAMILIES) >= set(BUILDERS)
    check_each(check_family, FAMILIES)


PROBABILITY = 0.3
DROPOUTS = dict(bert=2, gpt2=2, gptj=2, opt=2, t5=4, vit=2, whisper=10, blip2=8, llama=2, falcon=0)
"""How many blocks with dropout inside the models of each family have."""


def put_dropout_into_blocks(model: nn.Module) -> nn.Module:
    for module in model.modules():
        rule = rule_for(type(module))
        for path in rule.dropouts if rule else ():
            owner, _, name = path.rpartition(".")
            holder = module.get_submodule(owner)
            if isinstance(getattr(holder, name, None), nn.Module):
                getattr(holder, name).p = PROBABILITY
            elif hasattr(holder, name):
                setattr(holder, name, PROBABILITY)
    return model


def _draw_as_the_ranks(model: nn.Module, blocks: list[Block]) -> int:
    """Let the unsharded ``model`` draw the masks of all ranks' units; returns how many modules have dropout inside."""
    attached = 0
    for block in blocks:
        module = model.get_submodule(block.name)
        rule = rule_for(type(module))
        assert rule is not None
        if not _has_dropout(module, rule):
            continue
        everything = [UnitRange(rank, 0, block.units) for rank in range(dist.get_world_size())]
        dropout = UnitDropout(block.name, block.units, -1 if rule.heads is None else -3, lambda all=everything: all)
        first = next(module.get_submodule(path) for path in rule.inputs)
        vars(module)["forward"] = Surrounded(module, partial(dropout.between, first, module.get_submodule(rule.output)))
        attached += 1
    return attached


def check_dropout(name: str, number: int) -> int:
    model, inputs = BUILDERS[name]()
    reference = copy.deepcopy(put_dropout_into_blocks(randomize(model).train()))
    sharded = shard(model, **SHARDING_OPTIONS.get(name, {}))
    migration = Migration(number, blocks_only=True)
    attached = _draw_as_the_ranks(reference, migration.attach("block", sharded))
    loss, gradients = sharding._loss_and_gradients(reference, family_loss(inputs))
    shares = {
        name: own_share(parameter, whole)
        for name, parameter in sharded.named_parameters()
        if (whole := gradients[name]) is not None
    }
    sharding._assert_loss_and_gradients(sharded, family_loss(inputs), migration.cases(), loss, shares)
    return attached


@on(2)
def families_with_dropout_compute_the_same_as_their_unsharded_model_with_the_same_masks() -> None:
    check_each(check_dropout, DROPOUTS)


SLOPES: dict[str, dict[str, Any]] = {
    "bert": dict(hidden_act="prelu", position_embedding_type="relative_key"),
    "gpt2": dict(activation_function="prelu"),
    "llama": dict(hidden_act="prelu"),
    "vit": dict(hidden_act="prelu"),
}
"""Options of configurations, with which all ranks have trained parameters whole that they use inside of blocks."""


def check_slopes(name: str, number: int) -> None:
    model, inputs = BUILDERS[name]()
    if name == "sam":
        # Colossal-AI computes other outputs of SAM than one process does, but not other features of images.
        def loss_of(sam: Any) -> torch.Tensor:
            return sam.vision_encoder(inputs["pixel_values"]).last_hidden_state.square().mean()

        assert_same_as_unsharded(randomize(model).train(), loss_of)
        return
    model = type(model)(type(model.config)(**(model.config.to_diff_dict() | SLOPES[name])))
    migration = Migration(number)
    assert_same_as_unsharded(randomize(model).train(), family_loss(inputs), migration.cases())
    migration.finish()


@on(2)
def partial_gradients_of_families_are_summed() -> None:
    check_each(check_slopes, dict.fromkeys([*SLOPES, "sam"]))


# timm's VisionTransformer --------------------------------------------------------------------------------------------


def vit(**options: Any) -> VisionTransformer:
    """A small ViT with 12 heads of width 3: each of 2, 3 or 4 ranks has 18, 12 or 9 of its 36 features."""
    sizes = dict(img_size=8, patch_size=4, num_classes=7, embed_dim=36, depth=2, num_heads=12, mlp_ratio=4)
    torch.manual_seed(0)
    return randomize(VisionTransformer(**(sizes | options)))


def images_and_labels(batch: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, 8, 8, generator=generator), torch.arange(batch) % 7


def loss_of_vit(model: VisionTransformer) -> torch.Tensor:
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
def loss_and_gradients_of_timms_vit_equal_those_of_the_unsharded_model() -> None:
    for name in VARIANTS if dist.get_world_size() == 2 else ("plain", "qk_norm"):
        try:
            sharded = assert_same_as_unsharded(vit(**VARIANTS[name]), loss_of_vit)
        except Exception as error:
            raise AssertionError(f"variant {name!r}: {error}") from error
        if name == "plain":
            counts = {"HeteroFusedLinear1D_Col": 2, "HeteroLinear1D_Col": 2, "HeteroLinear1D_Row": 4}
            assert parallel_layer_counts(sharded) == counts


def _seeded_loss_of(model: VisionTransformer) -> torch.Tensor:
    torch.manual_seed(7)
    return loss_of_vit(model)


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
        loss = loss_of_vit(model)
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
    expected = loss_of_vit(reference)
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
