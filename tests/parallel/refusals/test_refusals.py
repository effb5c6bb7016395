"""What is refused on ranks, and in which words. The text files are tables as in ``tests/unit/refusals``: a line
``$ expression``, below it what is said."""

import gc
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from colossalai.nn.optimizer import Lamb
from peft import LoraConfig, get_peft_model
from timm.layers import GlobalResponseNormMlp
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import DataLoader

from colossal_hetero import BalanceConfig, CheckpointConfig, Pruning
from tests.parallel.plugin.hybrid import test_hybrid_plugin, test_plan_agreement
from tests.parallel.plugin.hybrid.test_hybrid_plugin import SEQUENCE
from tests.parallel.plugin.hybrid.test_planned_run import recomputing
from tests.parallel.plugin.unequal.test_unequal_replicas import PLANS, exact_zero
from tests.parallel.plugin.zero.test_training_scripts import make_transformer
from tests.support import checkpoint_runs, language_models, planning, sharding, training, zero_runs
from tests.support.checks import on
from tests.support.transcripts import missing_part, read_cases


def changed(model: nn.Module, name: str, change: Any) -> nn.Module:
    change(model.get_submodule(name))
    return model


def with_own_head() -> nn.Module:
    model = training.tiny_vit()
    model.__class__ = type("Renamed", (type(model),), {"forward_head": lambda self, x, pre_logits=False: x})
    return model


def boost_with(plugin: Any, batch_size: int) -> None:
    model, loader = training.tiny_vit(depth=4), plugin.prepare_dataloader([(0, 0)] * 32, batch_size)
    training.Booster(plugin=plugin).boost(model, training.sgd(model), training.loss_of, loader)


def boost_adapters(stage: int) -> None:
    """With an optimizer that was made before."""
    plugin, base = training.zero_plugin(stage, 8), make_transformer()
    optimizer, booster = training.sgd(base), training.Booster(plugin=plugin)
    model = booster.enable_lora(base, lora_config=LoraConfig(task_type="SEQ_CLS", r=2))
    booster.boost(model, optimizer, dataloader=plugin.prepare_dataloader(zero_runs.Numbered()))


NAMES: dict[str, Any] = {}
for each in (training, language_models, sharding, nn.utils, planning, test_hybrid_plugin, test_plan_agreement):
    NAMES |= vars(each)
NAMES |= dict(ADAPTERS=LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True), get_peft_model=get_peft_model)
NAMES |= dict(zero=zero_runs.boosted, Net=zero_runs.Net, PLANS=PLANS, RESIZE=BalanceConfig(mode="resize"), Lamb=Lamb)
NAMES |= dict(GlobalResponseNormMlp=GlobalResponseNormMlp, ParallelScalingBlock=ParallelScalingBlock, partial=partial)
NAMES |= dict(parametrizations=parametrizations, pruned=partial(prune.l1_unstructured, amount=0.5))
NAMES |= dict(CheckpointConfig=CheckpointConfig, DataLoader=DataLoader, exact_zero=exact_zero)
NAMES |= dict(SEQUENCE=SEQUENCE, Pruning=Pruning, recomputing=recomputing, make_transformer=make_transformer)
for each in (changed, with_own_head, boost_with, boost_adapters):
    NAMES[each.__name__] = each


def refusal(case: str, names: dict[str, Any]) -> str:
    """What is said. All ranks have made their groups before the first one destroys what the case has made."""
    try:
        made, message = eval(case, NAMES | names), "no refusal"
    except Exception as error:
        is_refusal = isinstance(error, (ValueError, TypeError, RuntimeError))
        made, message = error, str(error) if is_refusal else f"no refusal, but {error!r}"
    dist.barrier()
    del made
    return message


@on(2, "two_ranks")
@on(3, "three_ranks")
@zero_runs.unmeasured
def cases_are_refused(table: str, **names: Any) -> None:
    unraisable: list[str] = []
    sys.unraisablehook = lambda hook: unraisable.append(str(hook.exc_value))
    wrong = []
    for case, says in read_cases(Path(__file__).with_name(f"{table}.txt")):
        message = refusal(case, names)
        if (missing := missing_part(says, message)) is not None:
            wrong.append(f"{case}: {missing} of {message!r}")
        gc.collect()
    assert not wrong, "\n".join(wrong)
    assert not unraisable, f"errors while something refused was deleted: {unraisable}"


@on(1)
def what_cannot_be_saved_or_resumed_is_refused(folder: Path) -> None:
    """In a folder with the checkpoint of a step."""
    run = partial(checkpoint_runs.boosted, "vit", checkpoint_runs.saving(folder))
    saved = run()
    saved.plugin.save(saved.model, saved.optimizer, step=1)
    saved.plugin.wait_for_saves()
    cases_are_refused("checkpoints", folder=folder, saved=saved, run=run, train=checkpoint_runs.train)
