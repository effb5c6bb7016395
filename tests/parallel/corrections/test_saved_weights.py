"""Checkpoints of models with a padded vocabulary, and of several plugins in one process, have the whole weights."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from colossalai.shardformer.layer.utils import Randomizer

from colossal_hetero import HeteroHybridParallelPlugin
from tests.support.checkpoints import read_weights
from tests.support.checks import on
from tests.support.language_models import MODELS
from tests.support.planning import make_plan, planned
from tests.support.training import Trained, assert_same_parameters, make_step, sgd, tiny_vit
from tests.support.training import boost as boost_vit

SAMPLES = 4


def boost(plugin: Any, name: str, vocabulary: int, seed: int = 0) -> Trained:
    """The model ``name`` with this vocabulary, whose weights follow from ``seed``."""
    model = MODELS[name](vocab_size=vocabulary)
    if seed:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + seed)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    return Trained([], model, optimizer, booster, plugin)


def step(run: Trained, vocabulary: int, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(vocabulary, (SAMPLES, 12), generator=generator)
    ids[:, 0] = torch.arange(vocabulary - SAMPLES, vocabulary)
    inputs = dict(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    if run.plugin.pp_size > 1:
        run.booster.execute_pipeline(iter([inputs]), run.model, lambda output, _: output.loss, run.optimizer)
    else:
        run.booster.backward(run.model(**inputs).loss, run.optimizer)
    make_step(run.optimizer)


def check_checkpoints(
    make_plugin: Any, name: str, vocabulary: int, options: dict[str, Any], sharded: bool, folder: Path
) -> None:
    options = dict(precision="fp32") | options
    run = boost(make_plugin(**options), name, vocabulary)

    run.booster.save_model(run.model, str(folder / "initial"), shard=True)
    dist.barrier()
    saved = read_weights(folder / "initial")
    expected = MODELS[name](vocab_size=vocabulary).state_dict()
    for key in expected.keys() - {"lm_head.weight"} | (saved.keys() & {"lm_head.weight"}):
        whole = expected[key].to(saved[key].dtype)
        assert torch.equal(saved[key], whole), f"{key}: {tuple(saved[key].shape)} saved, {tuple(whole.shape)} expected"

    step(run, vocabulary, 0)
    model, optimizer = (str(folder / what) for what in ("model", "optimizer"))
    run.booster.save_model(run.model, model, shard=sharded)
    run.booster.save_optimizer(run.optimizer, optimizer, shard=sharded)
    dist.barrier()

    resumed = boost(make_plugin(**options), name, vocabulary, seed=1)
    resumed.booster.load_model(resumed.model, model)
    assert_same_parameters(resumed.parameters, run.parameters, "loaded weights")
    resumed.booster.load_optimizer(resumed.optimizer, optimizer)
    if options["precision"] == "fp32":  # a checkpoint of half-precision training has no fp32 weights
        for each in (run, resumed):
            step(each, vocabulary, 1)
        assert_same_parameters(resumed.parameters, run.parameters, "training continued from the checkpoint")


PIPELINE = dict(pp_size=2, num_microbatches=2)

CASES: dict[int, list[tuple[dict[str, Any], bool]]] = {
    2: [
        (dict(tp_size=2, pp_size=1), True),
        (dict(tp_size=2, pp_size=1), False),
        (dict(tp_size=1, pp_size=1), False),
        (dict(tp_size=1, **PIPELINE), True),
        (dict(tp_size=1, pp_size=1, zero_stage=1, precision="bf16"), True),
    ],
    4: [(dict(tp_size=2, **PIPELINE), True)],
}
"""By number of ranks: options, and whether checkpoints are sharded."""


@on(2)
@on(4)
def weights_of_a_padded_vocabulary_are_whole(folder: Path) -> None:
    cases = [
        (make_plugin, *model, *case)
        for make_plugin in (HeteroHybridParallelPlugin, HybridParallelPlugin)
        for model in (("gpt2", 97), ("llama", 1000))
        for number, case in enumerate(CASES[dist.get_world_size()])
        if (make_plugin is HeteroHybridParallelPlugin and (model[0] == "gpt2" or number % 4 == 0))
        or (model[0], number) == ("llama", 0)
    ]
    for number, case in enumerate(cases):
        own_folder = folder / str(number)
        own_folder.mkdir(exist_ok=True)
        try:
            check_checkpoints(*case, own_folder)
        except BaseException as error:
            raise AssertionError(f"failed: {case}") from error


@on(2, [[[0, 1]]], [[[1, 0]]], [[[0, 1]]])
@on(3, [[[0, 1, 2]]], [[[2, 0, 1]]])
@on(4, [[[0, 1]], [[2, 3]]], [[[3, 0]], [[1, 2]]], [[[0], [2]], [[1], [3]]], [[[1, 3]], [[0, 2]]])
def several_plugins_save_the_weights_of_their_own_models(*orders: list[list[list[int]]], folder: Path) -> None:
    Randomizer.reset_index()  # ranks of an earlier pipeline have counted differently
    runs = []
    for number, order in enumerate(orders):
        stages = len(order[0])
        model = tiny_vit()
        expected = model.state_dict()
        run = boost_vit(planned(make_plan(order, (2 // stages,) * stages, 2, 2)), model, sgd)
        runs.append(run)  # so that no group is destroyed
        for each in range(2):
            path = folder / f"order {number}-{each}"
            run.booster.save_model(run.model, str(path), shard=True)
            dist.barrier()
            torch.testing.assert_close(read_weights(path), dict(expected), rtol=0, atol=0)
