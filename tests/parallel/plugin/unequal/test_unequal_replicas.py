"""Plans with any split and any order of ranks, of equal replicas or of unequal depth, split and batch, train like one
process on the same global batches, also if stages train nothing or have no parameter of some group of the optimizer."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import transformers
from colossalai.checkpoint_io.utils import gather_distributed_param
from colossalai.nn.optimizer import Lamb
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from colossal_hetero import HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import Plan
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, planned, share, unequal_plan
from tests.support.random_examples import IS_THOROUGH
from tests.support.sharding import randomize
from tests.support.training import boost, make_step, tiny_vit

STEPS, MICRO_BATCH, VOCABULARY = 4, 2, 101


def gpt2(layers: int = 4, dropout: float = 0.0) -> nn.Module:
    sizes = dict(vocab_size=VOCABULARY, n_positions=16, n_embd=24, n_layer=layers, n_head=4, use_cache=False)
    drops = dict(resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, attn_implementation="eager")
    return randomize(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops)))


def sizes_of(layers: int) -> dict[str, Any]:
    sizes = dict(vocab_size=VOCABULARY, hidden_size=24, intermediate_size=36, num_attention_heads=4)
    return dict(num_hidden_layers=layers, attn_implementation="eager", **sizes)


def llama(layers: int = 4, use_cache: bool = False) -> nn.Module:
    heads = dict(num_key_value_heads=2, use_cache=use_cache)
    return randomize(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes_of(layers), **heads)))


def bert() -> nn.Module:
    drops = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return randomize(transformers.BertForMaskedLM(transformers.BertConfig(**sizes_of(4), **drops)))


def vit() -> nn.Module:
    return tiny_vit(depth=4)


def shared() -> nn.Module:
    model = tiny_vit(depth=4)
    block = model.blocks[0]
    block.forward = partial(checkpoint, block.forward, use_reentrant=True)
    model.blocks = nn.Sequential(*[block] * 4)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "vit": vit, "shared": shared}


def samples(model: str, number: int, size: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if model in ("vit", "shared"):
        images = torch.randn(size, 3, 8, 8, generator=generator, dtype=torch.float64)
        return dict(x=images.to(dtype), labels=torch.arange(size) % 7)
    tokens = torch.randint(VOCABULARY, (size, 8), generator=generator)
    return dict(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens)


def loss_of(outputs: Any, inputs: dict[str, Tensor]) -> Tensor:
    """In the type of the outputs, if it is fp64; the models' own losses are fp32."""
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs, inputs["labels"])
    if outputs["logits"].dtype == torch.float32:
        return outputs["loss"]
    return cross_entropy(outputs["logits"].flatten(0, 1), inputs["labels"].flatten())


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "lamb":
        return Lamb(model.parameters(), lr=1e-2)
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Case(NamedTuple):
    plan: str
    model: str
    options: dict[str, Any] = {}  # noqa: RUF012  nobody changes it
    kind: str = "sgd"
    dtype: torch.dtype = torch.float64
    accumulation: int = 1
    no_sync: bool = False
    trained: str = ""  # one of :data:`PARTS`; all
    loop_clips: bool = False  # the loop clips, and not the step


def make(case: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODELS[case.model]().to(case.dtype)
    if not case.trained:
        return model, make_optimizer(model, case.kind)
    blocks = [list(block.parameters()) for block in model.blocks]
    inner = {id(each) for block in blocks for each in block}
    outer = [each for each in model.parameters() if id(each) not in inner]
    groups = PARTS[case.trained](model, blocks, outer)
    model.requires_grad_(False)
    for each in (each for group in groups for each in group):
        each.requires_grad = True
    rates = [dict(params=group, lr=0.05 / (number + 1)) for number, group in enumerate(groups)]
    return model, torch.optim.SGD(rates, momentum=0.9)


PARTS: dict[str, Callable[[Any, list[Any], list[Any]], list[Any]]] = {
    "first stages are frozen": lambda model, blocks, _: [
        blocks[3],
        [*model.norm.parameters(), *model.head.parameters()],
    ],
    "last stage is frozen": lambda model, blocks, _: [blocks[0], list(model.patch_embed.parameters())],
    "a group for each block": lambda _, blocks, outer: [outer, *reversed(blocks)],
    "nothing in the first group": lambda _, blocks, outer: [blocks[3], [*outer, *blocks[0], *blocks[1], *blocks[2]]],
}
"""Groups of parameters that are trained, by blocks of a ViT and the parameters outside of them."""


def train_alone(case: Case, size: int, max_norm: float) -> tuple[list[float], list[float], dict[str, Tensor]]:
    module, optimizer = make(case)
    losses, norms = [], []
    for step in range(STEPS):
        batch = samples(case.model, step, size, case.dtype)
        inputs = {"x": batch["x"]} if case.model in ("vit", "shared") else batch
        loss = loss_of(module(**inputs), batch)
        loss.backward()
        if max_norm:
            norms.append(float(nn.utils.clip_grad_norm_(module.parameters(), max_norm)))
        make_step(optimizer)
        losses.append(loss.item())
    return losses, norms, {name: each.detach() for name, each in module.named_parameters(remove_duplicate=False)}


def train_replicas(case: Case) -> tuple[list[float | None], list[float], dict[str, Tensor], int]:
    plan, accumulation = PLANS[case.plan], case.accumulation
    has_zero = case.options.get("zero_stage") or plan.zero_stage
    plugin = exact_zero(plan, **case.options) if has_zero else planned(plan, **case.options)
    Randomizer.reset_index()  # ranks with other numbers of layers have counted differently
    assert plugin.zero_stage == (case.options.get("zero_stage") or plan.zero_stage)
    module, optimizer = make(case)
    run = boost(plugin, module, lambda _: optimizer)
    losses, norms = [], []
    for step in range(STEPS):
        total: float | None = 0.0
        for part in range(accumulation):
            batch = samples(case.model, step, plan.global_batch * accumulation, case.dtype)
            first = part * plan.global_batch
            mine = {name: each[first : first + plan.global_batch][share(plugin)] for name, each in batch.items()}
            waits = case.no_sync and part + 1 < accumulation
            with run.booster.no_sync(run.model, run.optimizer) if waits else nullcontext():
                result = run.booster.execute_pipeline(
                    iter([mine]),
                    run.model,
                    lambda outputs, inputs: loss_of(outputs, inputs) / accumulation,
                    run.optimizer,
                    return_loss=True,
                )
            total = None if result["loss"] is None else total + float(result["loss"])
        if case.loop_clips:
            run.optimizer.clip_grad_by_norm(MAX_NORM)
        run.optimizer.step()
        norms.append(run.optimizer.get_grad_norm())
        run.optimizer.zero_grad()
        losses.append(total)
    if case.model == "vit":
        check_stage(run, bool(has_zero) and plan.symmetric)
    named = dict(run.model.unwrap().named_parameters(remove_duplicate=False))
    whole = {name: gather_distributed_param(each, keep_vars=False).detach().clone() for name, each in named.items()}
    return losses, norms, whole, plugin.replica()[0]


def check_stage(run: Any, is_sharded: bool) -> None:
    """This rank holds the blocks of its stage, and with ZeRO its share of a moment and a copy of all parameters."""
    plan, own = run.plugin.plan, dict(run.model.unwrap().named_parameters())
    (stage,) = [stage for each in plan.replicas for stage in each.stages if dist.get_rank() in stage.ranks]
    assert {int(name.split(".")[1]) for name in own if name.startswith("blocks.")} == set(range(*stage.blocks))
    if is_sharded:
        optimizer, held = run.optimizer.optim, {each.data_ptr() for each in own.values()}
        kept = [each for state in optimizer.state.values() for each in state.values()]
        kept += [each for group in optimizer.param_groups for each in group["params"] if each.data_ptr() not in held]
        whole = sum(each.numel() for each in own.values())
        assert sum(each.numel() for each in kept) == pytest.approx(whole * 2 / len(plan.replicas), rel=0.01)


def exact_zero(plan: Plan, **options: Any) -> HeteroHybridParallelPlugin:
    """A plugin with ZeRO in fp32; Colossal-AI offers only half precision with it. Master weights are always fp32."""
    plugin = HeteroHybridParallelPlugin(plan=plan, precision="bf16", **options)
    plugin.precision = "exact"
    plugin.zero_config["forced_dtype"] = None
    return plugin


def replica(ranks: list[list[int]], layers: list[int], micro_batches: int) -> Plan:
    return make_plan([ranks], layers, MICRO_BATCH, micro_batches)


CROSSED = [[[1], [2]], [[3], [0]]]
"""Two replicas. In one data-parallel group the first replica has the lower rank, in the other group the higher one."""


def in_zero(plan: Plan) -> Plan:
    """In ZeRO stage 1, without being told so."""
    return plan.model_copy(update={"zero_stage": 1})


PLANS: dict[str, Plan] = {
    "1+2": unequal_plan(replica([[0]], [4], 3), replica([[1], [2]], [1, 3], 2)),
    "2+1": unequal_plan(replica([[0], [1]], [1, 3], 2), replica([[2]], [4], 1)),
    "2+3": unequal_plan(replica([[0], [1]], [3, 1], 2), replica([[2], [3], [4]], [1, 1, 2], 3)),
    "1+2+2": unequal_plan(replica([[4]], [4], 1), replica([[0], [1]], [1, 3], 2), replica([[3], [2]], [3, 1], 2)),
    "splits": unequal_plan(replica([[0], [1]], [1, 3], 3), replica([[2], [3]], [3, 1], 2)),
    "batches": unequal_plan(replica([[0]], [4], 1), replica([[1]], [4], 3)),
    "pp2": replica([[1], [0]], [1, 3], 4),
    "pp3": replica([[2], [0], [1]], [1, 2, 1], 4),
    "pp2 ascending": replica([[0], [1]], [3, 1], 4),
    "pp3 ascending": replica([[0], [1], [2]], [1, 1, 2], 4),
    "dp2": make_plan([[[1]], [[0]]], [4], 2, 2),
    "dp3": make_plan([[[0]], [[1]], [[2]]], [4], 2, 1),
    "tp2": replica([[1, 0]], [4], 2),
    "tp2 pp2": replica([[3, 1], [2, 0]], [3, 1], 2),
    "tp2 dp2": make_plan([[[0, 2]], [[3, 1]]], [4], 2, 2),
    "dp2 pp2": make_plan([[[3], [0]], [[1], [2]]], [3, 1], 2, 3),
    "crossed": make_plan(CROSSED, [1, 3], 2, 3),
    "tp2 1+2": unequal_plan(replica([[0, 1]], [4], 3), replica([[2, 3], [4, 5]], [1, 3], 2)),
}


def train_each(cases: list[Case]) -> list[Any]:
    return [train_replicas(case) for case in cases]


def compare(case: Case, results: Sequence[Any]) -> None:
    chosen = PLANS[case.plan]
    max_norm = MAX_NORM if case.loop_clips else case.options.get("max_norm", 0.0)
    losses, norms, expected = train_alone(case, chosen.global_batch * case.accumulation, max_norm)
    is_double = case.dtype == torch.float64
    tolerance = dict(rtol=1e-9, atol=1e-9) if is_double else dict(rtol=1e-5, atol=1e-5)
    weights = [each.micro_batches * chosen.micro_batch / chosen.global_batch for each in chosen.replicas]
    # The first replica is the one with rank 0.
    order = sorted(range(len(weights)), key=lambda number: 0 not in sum(chosen.rank_order[number], ()))
    for step in range(STEPS):
        shares: dict[int, float] = {}
        for own, *_, index in results:
            if own[step] is not None:
                shares[index] = own[step]
        found = sum(weights[order[index]] * share for index, share in shares.items())
        assert found == pytest.approx(losses[step], rel=1e-6), case  # Colossal-AI's schedules sum losses in fp32
    copies: dict[str, Tensor] = {}
    for _, own_norms, whole, _ in results:
        if max_norm and not case.loop_clips:
            assert own_norms == pytest.approx(norms, rel=tolerance["rtol"]), case
        for name, each in whole.items():
            if case.kind == "sgd" or is_double:
                reference = expected[name]
                torch.testing.assert_close(
                    each[: len(reference)], reference, **tolerance, msg=lambda text, n=name: f"{case}, {n}: {text}"
                )
            first = copies.setdefault(name, each)
            assert torch.equal(first, each), f"{case}: copies of {name} differ"


PLANS |= {f"{name} zero": in_zero(PLANS[name]) for name in ("1+2", "pp2 ascending", "dp2", "dp3", "dp2 pp2", "tp2 dp2")}
MAX_NORM = 0.5
CLIPPED = dict(max_norm=MAX_NORM)
ZERO, LATE = CLIPPED | dict(zero_stage=1), dict(zero_stage=1, overlap_communication=False)
SMALL = CLIPPED | dict(ddp_bucket_cap_mb=1e-3)

CASES = [
    *(Case(plan, model, CLIPPED) for plan, model in (("1+2", "gpt2"), ("2+3", "llama"), ("1+2+2", "vit"))),
    *(Case(plan, model, CLIPPED) for plan, model in (("splits", "bert"), ("batches", "vit"), ("tp2 1+2", "vit"))),
    *(Case("tp2 1+2", model, CLIPPED, dtype=torch.float32) for model in ("gpt2", "llama")),
    # A pipeline whose stages share a weight. Colossal-AI's norms are summed in fp32.
    *(Case(plan, "gpt2", CLIPPED, dtype=torch.float32) for plan in ("pp2", "pp3")),
    Case("pp3", "gpt2"),
    # Layers that are used in several checkpoints.
    *(Case(plan, "shared", SMALL | dict(zero_stage=0)) for plan in ("batches", "1+2+2")),
    Case("batches", "shared", SMALL | dict(zero_stage=1), dtype=torch.float32),
    *(Case(plan, model, ZERO, dtype=torch.float32) for plan, model in (("2+1", "gpt2"), ("1+2+2", "vit"))),
    Case("2+1", "vit", LATE, "adamw", dtype=torch.float32),  # sums at the end too
    Case("1+2 zero", "vit", dtype=torch.float32),
    *(Case("1+2", model, {}, kind, torch.float32) for model, kind in (("vit", "lamb"), ("llama", "adamw"))),
    # Gradients of several global batches accumulate.
    *(Case("2+1", "gpt2", accumulation=3, no_sync=no_sync) for no_sync in (False, True)),
    *(
        Case("2+1", "gpt2", dict(zero_stage=1), dtype=torch.float32, accumulation=3, no_sync=no_sync)
        for no_sync in (False, True)
    ),
    # Equal replicas, any order of ranks.
    Case("pp2 ascending", "vit", dict(enable_metadata_cache=False)),
    *(Case(plan, "vit") for plan in ("pp2", "pp3", "pp3 ascending", "dp2", "crossed")),
    *(Case(plan, "vit", dtype=torch.float32) for plan in ("dp3 zero", "dp2 pp2 zero", "tp2 dp2 zero")),
    *(Case(plan, "vit") for plan in ("tp2", "tp2 pp2", "tp2 dp2")),
    Case("dp2 pp2", "vit", dict(dp_outside=False)),
]
PARTLY = [("pp2 ascending", True), ("1+2 zero", False), ("dp2 pp2", False)]
if IS_THOROUGH:
    PARTLY += [("dp2 pp2", True), *((plan, False) for plan in ("pp2 ascending", "1+2", "pp2 ascending zero"))]
    PARTLY += [("dp2 pp2 zero", False)]
    CASES.append(Case("dp2 zero", "vit", dtype=torch.float32))
CASES += [
    Case(plan, "vit", CLIPPED if not loop else {}, dtype=torch.float32, trained=part, loop_clips=loop)
    for plan, loop in PARTLY
    for part in PARTS
]


@pytest.mark.parametrize("ranks", sorted({PLANS[case.plan].world_size for case in CASES}))
def test_replicas_train_like_one_process(ranks: int) -> None:
    cases = [case for case in CASES if PLANS[case.plan].world_size == ranks]
    results = run_ranks(ranks, train_each, cases, timeout_seconds=280)
    for case, of_case in zip(cases, zip(*results, strict=True), strict=True):
        compare(case, of_case)
