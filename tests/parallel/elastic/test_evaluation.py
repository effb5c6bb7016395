"""A member that is lost during an evaluation."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch
from colossalai.booster import Booster

from tests.parallel.elastic.test_elastic_training import STEPS, check_parameters
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2, loss_of
from tests.support.elastic_jobs import Job, Kill, Texts, train, undisturbed

SAMPLES = 8


def batch() -> dict[str, torch.Tensor]:
    samples = [Texts()[index] for index in range(SAMPLES)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def train_and_evaluate(kill: Kill | None, told: Any) -> None:
    """The script of members that evaluate after each step, each the same batches."""

    def evaluate(booster: Booster, model: Any) -> None:
        model.eval()
        with torch.no_grad():
            batches = iter([batch(), batch()])
            for _ in range(2):
                result = booster.execute_pipeline(batches, model, loss_of, return_loss=True)
                told.put(("evaluated", booster.plugin.version, result["loss"] and float(result["loss"])))
        assert not model.training
        model.train()

    train(STEPS, kill, None, (), told, after_step=evaluate)


def test_the_batch_is_evaluated_again() -> None:
    """A stage of a pipeline is lost, then a whole replica, which the others notice after their own passes."""
    kills = [Kill(6, "evaluation"), Kill(2, "evaluation"), None, None]
    found: dict[int, list[float]] = {}
    with Job(STEPS) as job:
        for node, kill in zip(["big-0", "small-0", "small-1", "big-1"], kills, strict=True):
            job._script = (train_and_evaluate, kill)
            job.start(node)
        while job.alive():
            message = job.message()
            if message is not None and message[1] == "evaluated" and message[2][1] is not None:
                found.setdefault(message[2][0], []).append(message[2][1])
        outcome = job.finish()
    assert outcome.errors == [] and [outcome.ended[number] for number in range(4)] == [-9, -9, 0, 0]
    check_parameters(outcome)
    changes = [(each.before, each.after, each.iterations_repeated) for each in chain(*outcome.recoveries)]
    assert sorted(changes) == [(3, 2, 0)] * 2 + [(4, 3, 0)] * 2
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, losses in found.items():
        model = gpt2().double()
        model.load_state_dict(undisturbed(step)[1], strict=False)
        with torch.no_grad():
            expected = loss_of(model(**batch()), batch()).item()
        assert losses == pytest.approx([expected] * len(losses), abs=1e-6)
