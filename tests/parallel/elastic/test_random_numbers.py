"""Dropout and data augmentation do not depend on who computes: a job whose members change trains like one member."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.parallel.plugin.unequal.test_unequal_replicas import VOCABULARY, gpt2
from tests.support import elastic_jobs
from tests.support.elastic_jobs import Job, Kill, Outcome, Texts, train
from tests.support.random_examples import IS_THOROUGH

STEPS = 10


class ChangedTexts(Texts):
    """Texts of which random tokens are replaced, with the random numbers of torch, NumPy and Python."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        tokens = sample["input_ids"]
        tokens[random.randrange(len(tokens))] = np.random.randint(VOCABULARY)
        tokens[torch.randint(len(tokens), ())] = torch.randint(VOCABULARY, ())
        return sample


def gpt2_with_dropout() -> nn.Module:
    model = gpt2()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.2
    model.gradient_checkpointing_enable()
    return model


def train_with_random_numbers(seed: int, joins: Sequence[int], kill: Kill | None, told: Any) -> None:
    """The script of members; the random state of each process is another one."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    changed = dict(Texts=ChangedTexts, gpt2=gpt2_with_dropout)
    with patch.multiple(elastic_jobs, **changed):
        train(STEPS, kill, None, joins, told)


def run(nodes: Sequence[str], kills: Mapping[int, Kill], joins: Mapping[str, int]) -> Outcome:
    waits, left = tuple(joins.values()), dict(joins)

    def start(node: str) -> None:
        number = len(job.members)
        job.start(node, script=(train_with_random_numbers, 17 + number, waits, kills.get(number)))

    def at_message(_: int, kind: str, content: list[Any]) -> None:
        for node in [node for node, after in left.items() if kind == "step" and content[0] == after]:
            del left[node]
            start(node)

    with Job(STEPS) as job:
        for node in nodes:
            start(node)
        return job.run(at_message)


@pytest.fixture(scope="module")
def undisturbed() -> Mapping[str, Any]:
    outcome = run(["big-0"], {}, {})
    assert outcome.errors == []
    return outcome.parameters[0]


@pytest.mark.parametrize("dead", [0, 2] if IS_THOROUGH else [0])
def test_members_that_change_draw_the_same_random_numbers(undisturbed: Mapping[str, Any], dead: int) -> None:
    outcome = run(["big-0", "small-0", "small-1"], {dead: Kill(3, "backward")}, {"small-2": 5})
    assert outcome.errors == []
    assert len({change.after for of_member in outcome.recoveries for change in of_member}) == 2
    expected = torch.from_numpy(undisturbed["transformer.wte.weight"])
    for parameters in outcome.parameters:
        for name, found in parameters.items():
            reference = torch.from_numpy(undisturbed[name]) if name in undisturbed else expected
            size = min(len(found), len(reference))
            torch.testing.assert_close(torch.from_numpy(found)[:size], reference[:size], rtol=1e-9, atol=1e-9)
