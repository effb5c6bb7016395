"""What does not fit a plan is refused with a clear message, if possible before training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch.utils.data import TensorDataset
from transformers import BertConfig, BertForSequenceClassification, T5Config, T5ForConditionalGeneration

from colossal_hetero import BatchConfig, HeteroHybridParallelPlugin
from colossal_hetero.planner.cost.plan import save_plan
from colossal_hetero.plugin.hybrid.live_plan import follows
from colossal_hetero.plugin.plan_config import PlanConfig
from tests.support.harness import run_ranks
from tests.support.planned_runs import MICRO_BATCH, MICRO_BATCHES, images_and_labels
from tests.support.planning import boosted, make_plan, planned
from tests.support.training import boost, loss_of, pipeline_step, sgd, tiny_vit, train_alone

PLAN = make_plan([[[1], [0]]], (1, 3), MICRO_BATCH, MICRO_BATCHES)


def refuse_arguments(folder: Path) -> None:
    batches = BatchConfig(global_batch_size=8)
    refusals: list[tuple[str, Any, dict[str, Any]]] = [
        (r"tp_size=2 contradicts the plan, which has 1; leave it out", PLAN, dict(tp_size=2)),
        (r"pp_size=1 contradicts the plan, which has 2", PLAN, dict(pp_size=1)),
        (r"num_microbatches=8 contradicts the plan, which has 4", PLAN, dict(num_microbatches=8)),
        (r"microbatch_size=1 contradicts the plan, which has 2", PLAN, dict(microbatch_size=1)),
        (r"_per_stage=\[3, 1\] contradicts the plan, which has \[1, 3\]", PLAN, dict(num_layers_per_stage=(3, 1))),
        (r"pp_style='interleaved' contradicts the plan, which has '1f1b'", PLAN, dict(pp_style="interleaved")),
        (r"pp_size=2\): a plan gives each pipeline the micro-batches", PLAN, dict(batches=batches)),
        (r"the plan is for 4 ranks, but 2 were started; start 4", make_plan([[[0, 1], [2, 3]]], (1, 3)), {}),
        (r"uses 1 device and leaves others idle \(rank 1\).*start 1 on ", make_plan([[[0]]], (4,)), {}),
        (r"1 micro-batch for 2 stages.*1F1B schedule needs", make_plan([[[0], [1]]], (1, 3), 2, 1), {}),
        (r"no-such-plan\.json", folder / "no-such-plan.json", {}),
        (r'plan="auto" needs planning=PlanConfig\(cluster=…, profile=…, global_batch_size=…\)', "auto", {}),
        (
            "global_batch_size=8 in batches contradicts the plan, which has 16",
            make_plan([[[0]], [[1]]], (4,)),
            dict(batches=batches),
        ),
    ]
    for message, refused, options in refusals:
        with pytest.raises(ValueError, match=message):
            planned(refused, **options)
    with pytest.raises(TypeError, match=r'plan=7 is neither a Plan, nor the path of a plan file, nor "auto"'):
        planned(7)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="planning='auto' is not a PlanConfig"):
        planned(PLAN, planning="auto")
    with pytest.raises(ValueError, match="adapters are saved by rank 0, which must be in the first stage"):
        planned(PLAN).enable_lora(tiny_vit(depth=4))
    with pytest.raises(ValueError, match="ranks 1 were given other plans than rank 0"):
        planned(PLAN if dist.get_rank() == 0 else make_plan([[[1], [0]]], (2, 2)))


def bert(layers: int) -> torch.nn.Module:
    sizes = dict(hidden_size=24, num_attention_heads=4, intermediate_size=36, vocab_size=64)
    return BertForSequenceClassification(BertConfig(num_hidden_layers=layers, **sizes))


def refuse_at_boost(folder: Path) -> None:
    other = r"divides 4 blocks of tiny ViT into \[1, 3\], but the model has 6 blocks; plan with a profile of this model"
    for plan, model, words in (
        (PLAN, tiny_vit(depth=6), other),
        (PLAN, bert(6), other),
        (make_plan([[[0, 1]]], (4,)), tiny_vit(depth=6), r"divides 4 blocks.*the model has 6"),
    ):
        with pytest.raises(ValueError, match=words):
            boost(planned(plan), model)
    # The global batch must be as large as planned. This is checked before training and in each iteration.
    if dist.get_rank() == 0:
        save_plan(PLAN, folder / "plan.json")
    path = folder / ("plan.json" if dist.get_rank() == 0 else "only rank 0 has it")
    plugin = planned(path, tp_size=1, pp_size=2)
    assert plugin.plan == PLAN
    model = tiny_vit(depth=4)
    loader = plugin.prepare_dataloader(TensorDataset(torch.zeros(32)), 6)
    too_small = r"a batch of 6 samples does not fit the plan: .* takes 4 micro-batches of 2; use batch_size=8"
    with pytest.raises(ValueError, match=too_small):
        Booster(plugin=plugin).boost(model, sgd(model), loss_of, loader)
    with pytest.raises(ValueError, match=too_small):
        pipeline_step(boosted(PLAN), iter([images_and_labels(0, 6)]))


def refuse_numbers_of_layers(_: Path) -> None:
    many = dict(num_microbatches=4)
    chunked = dict(precision="fp32", num_model_chunks=2, num_layers_per_stage=[1, 3], **many)
    for style, nodes in (("interleaved", None), ("zbv", [])):
        with pytest.raises(ValueError, match=rf"\[1, 3\] has 2 numbers for 2 stages × 2 chunks; give 4, .*{style}"):
            HeteroHybridParallelPlugin(1, 2, pp_style=style, scheduler_nodes=nodes, **chunked)
    with pytest.raises(ValueError, match=r"\[1, 2, 3\] has 3 numbers for 2 stages; give 2"):
        HeteroHybridParallelPlugin(1, 2, num_layers_per_stage=[1, 2, 3], **many)
    for layers in ([0, 5], [-1, 6], [1.5, 2.5]):
        with pytest.raises(ValueError, match=r"num_layers_per_stage=.* is not possible"):
            HeteroHybridParallelPlugin(1, 2, num_layers_per_stage=layers, **many)
    plugin = HeteroHybridParallelPlugin(1, 2, precision="fp32", num_layers_per_stage=[1, 3], **many)
    for model in (tiny_vit(depth=6), bert(6)):
        with pytest.raises(ValueError, match=r"num_layers_per_stage=\[1, 3\] adds up to 4; the model has 6 layers"):
            boost(plugin, model)
    with pytest.raises(TypeError, match="multiple values for argument 'sp_size'"):
        HeteroHybridParallelPlugin(1, 2, None, sp_size=1)


def t5() -> T5ForConditionalGeneration:
    """A T5 with 4 blocks in its encoder, as many as the plan divides, and 3 in its decoder."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=24, d_kv=6, d_ff=36, num_heads=4, num_layers=4, num_decoder_layers=3)
    return T5ForConditionalGeneration(T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0))


def refuse_an_encoder_with_a_decoder(_: Path) -> None:
    """A T5 cannot be divided as planned; Colossal-AI divides it as the refusal says."""
    options = dict(pp_size=2, num_microbatches=MICRO_BATCHES, precision="fp32")
    for refusing in (planned(PLAN), HeteroHybridParallelPlugin(tp_size=1, num_layers_per_stage=[4, 3], **options)):
        with pytest.raises(ValueError, match=r"T5 .*; leave out plan and num_layers_per_stage, and give pp_size=2"):
            boost(refusing, t5())
    ids = torch.randint(1, 64, (MICRO_BATCH * MICRO_BATCHES, 6), generator=torch.Generator().manual_seed(1))
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
    run = boost(HeteroHybridParallelPlugin(tp_size=1, **options), t5(), sgd)
    losses = [pipeline_step(run, iter([batch]), lambda output, _: output.loss) for _ in range(2)]
    alone = t5()
    expected = train_alone(alone, sgd(alone), [batch] * 2, lambda model, inputs: model(**inputs).loss)
    assert losses == ([None] * 2 if dist.get_rank() == 0 else pytest.approx(expected, rel=1e-5))


CHECKS = [refuse_arguments, refuse_at_boost, refuse_numbers_of_layers, refuse_an_encoder_with_a_decoder]


def run_all(folder: Path) -> None:
    for check in CHECKS:
        check(folder)
        dist.barrier()  # before groups are destroyed


def test_what_does_not_fit_a_plan_is_refused(tmp_path: Path) -> None:
    run_ranks(2, run_all, tmp_path)


GIVEN = dict(cluster="cluster.toml", profile="profile.json", global_batch_size=8)


@pytest.mark.parametrize(
    "plan, planning, batches, is_elastic, expected",
    [
        ("auto", GIVEN, None, False, True),
        ("auto", GIVEN | {"follow_speed": False}, None, False, False),
        ("plan.json", GIVEN, None, False, False),
        ("plan.json", GIVEN | {"follow_speed": True}, None, False, True),
        ("auto", GIVEN, BatchConfig(global_batch_size=8), False, False),
        ("auto", GIVEN, None, True, False),
        (None, {}, None, False, False),
        (None, {"follow_speed": True}, None, False, "there is no plan"),
        ("plan.json", {"follow_speed": True}, None, False, "new plans are made from planning=PlanConfig"),
        (
            "auto",
            GIVEN | {"follow_speed": True},
            BatchConfig(global_batch_size=8),
            False,
            "leave follow_speed or batches",
        ),
        ("auto", GIVEN | {"follow_speed": True}, None, True, "leave follow_speed or elastic out"),
        ("auto", GIVEN | {"drift_threshold": math.inf}, None, False, False),
        ("auto", GIVEN | {"drift_threshold": math.inf, "follow_speed": True}, None, False, "stages are not timed"),
    ],
)
def test_which_plans_follow_speeds(plan: Any, planning: Any, batches: Any, is_elastic: bool, expected: Any) -> None:
    arguments = dict(plan=plan, batches=batches)
    if isinstance(expected, bool):
        assert follows(PlanConfig(**planning), arguments, is_elastic) is expected
        return
    with pytest.raises(ValueError, match=f"follow_speed=True is not possible: .*{expected}"):
        follows(PlanConfig(**planning), arguments, is_elastic)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("drift_threshold", 0.0, "drift_threshold=0.0 must be a positive share"),
        ("drift_threshold", float("nan"), "must be a positive share"),
        ("follow_speed", "dry", "follow_speed='dry' must be True, False or None"),
        ("global_batch_size", 0, "global_batch_size=0 must be a whole number"),
        ("micro_batch_sizes", (), "micro_batch_sizes is empty"),
        ("micro_batch_sizes", (2, 1.5), "micro_batch_sizes=1.5 must be"),
        *(("zero_stages", stages, r"cannot be planned; use \(0,\), \(1,\) or \(0, 1\)") for stages in (1, (), (0, 2))),
    ],
)
def test_a_plan_config_refuses_wrong_values(field: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanConfig(**{field: value})
    with pytest.raises(TypeError, match="cluster=7 is neither a file's path nor a Topology"):
        PlanConfig(cluster=7)  # type: ignore[arg-type]
