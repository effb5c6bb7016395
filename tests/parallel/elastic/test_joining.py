"""Processes that come, save together, and draw the same random numbers whoever computes."""

import dataclasses
import random
import signal
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from torch import Tensor, nn

from colossal_hetero import ElasticConfig
from colossal_hetero.planner.profile.layer_profile import ModelProfile
from tests.parallel.elastic.test_elastic_training import STEPS
from tests.parallel.plugin.unequal.test_unequal_replicas import VOCABULARY, gpt2
from tests.support import elastic_jobs
from tests.support.elastic_jobs import (
    LIMIT_SECONDS,
    QUICK,
    Job,
    Kill,
    Outcome,
    Texts,
    check_parameters,
    cluster,
    profile,
    run_job,
    train,
    undisturbed,
)
from tests.support.random_examples import IS_THOROUGH


def train_together(told: Any) -> None:
    train(STEPS, None, None, (), told, ElasticConfig(**QUICK, start_seconds=60.0, max_members=2))


def wait_until_counted(job: Job) -> None:
    while not job._server.check(["elastic/test/counted/started"]):
        time.sleep(0.05)


def test_a_member_that_comes_late_is_in_the_first_world_and_one_in_no_world_ends_by_sigterm_at_once() -> None:
    """torchrun waits for it before it starts the node again."""
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        wait_until_counted(job)
        job.start("small-0")
        outcome = job.run()
    assert outcome.errors == [] and outcome.recoveries == [(), ()]
    check_parameters(outcome.parameters, STEPS)
    with Job(0, script=(train_together,)) as job:
        job.start("big-0")
        wait_until_counted(job)
        job.members[0].terminate()
        job.members[0].join(20)
        assert job.members[0].exitcode == -signal.SIGTERM


def test_the_first_node_waits_for_a_second_one() -> None:
    with Job(STEPS) as job:
        job.start("small-0")
        time.sleep(2)  # mostly long enough to start and to find no plan
        assert job.alive() == [0] and job.message() is None
        job.start("small-1")
        outcome = job.run()
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, STEPS + 1))
    check_parameters(outcome.parameters, STEPS)


def test_a_member_that_is_left_alone_keeps_the_state_until_another_one_comes() -> None:
    """Two members share the model. One is warned, the other takes its half, which is more than it may train with."""
    with Job(STEPS) as job:
        job.start("small-0")
        job.start("small-1")
        deadline = time.monotonic() + LIMIT_SECONDS
        while 1 in job.alive():
            assert time.monotonic() < deadline, job.outcome
            message = job.message()
            if message is not None and message[1] == "step" and message[2][0] == 4:
                job.members[1].terminate()
        steps = len(job.outcome.losses)
        assert job.alive() == [0] and steps < STEPS
        job.start("small-2")
        outcome = job.run()
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0, 2: 0}
    assert sorted(outcome.losses) == list(range(1, STEPS + 1))
    assert [(each.before, each.after) for each in chain(*outcome.recoveries)] == [(2, 2)]
    check_parameters(outcome.parameters, STEPS)


def train_impatiently(told: Any) -> None:
    """The script of members that wait for 2 s at most, and whose devices are too small."""
    whole = cluster()
    kinds = {each.kind.name: dataclasses.replace(each.kind, memory_bytes=4 * 10**7) for each in whole.devices}
    small = dataclasses.replace(
        whole, devices=tuple(dataclasses.replace(each, kind=kinds[each.kind.name]) for each in whole.devices)
    )
    train(STEPS, None, None, (), told, ElasticConfig(**QUICK, join_seconds=2.0), small)


def test_all_members_say_what_is_missing_if_nobody_comes() -> None:
    with Job(0, script=(train_impatiently,)) as job:
        for node in ("big-0", "small-0"):
            job.start(node)
        outcome = job.run()
    assert len(outcome.errors) == 2
    for error in outcome.errors:
        assert "2 members, and no more came within 2 s: " in error
        assert "the model needs at least" in error or "no device can hold block" in error


def only_big() -> ModelProfile:
    whole = profile()
    return whole.model_copy(update={"times": tuple(each for each in whole.times if each.device == "big")})


def train_with_big(told: Any) -> None:
    with patch.object(elastic_jobs, "profile", only_big):
        train(STEPS, None, None, (), told, ElasticConfig(**QUICK))


def test_processes_that_cannot_join_are_refused_and_the_others_go_on() -> None:
    with Job(0) as job:
        job.start("big-0", script=(train_with_big,))

        def start(_: int, kind: str, content: list[Any]) -> None:
            if kind == "step" and content[0] == 2 and len(job.members) == 1:
                for node in ("small-0", "other-7"):
                    job.start(node, script=(train_with_big,))

        outcome = job.run(start)
    for words in (
        "has no times of small, the device of this process; it has those of big",
        "on node other-7, which is not in the cluster file; it has big-0, small-0",
    ):
        assert sum(words in error for error in outcome.errors) == 1, words
    assert [bool(outcome.ended[number]) for number in range(3)] == [False, True, True]
    assert outcome.recoveries == [()]


def test_all_members_are_warned_at_once(tmp_path: Path) -> None:
    """The state after the last step is saved, although only every third step is saved otherwise."""
    nodes = ["big-0", "small-0", "small-1"]
    outcome = run_job(nodes, STEPS, warnings={0: 4, 1: 4, 2: 4}, folder=tmp_path)
    assert outcome.errors == [] and set(outcome.ended.values()) == {0}
    last = max(outcome.losses)
    assert 4 <= last < STEPS and outcome.parameters == []
    outcome = run_job(nodes[:2], STEPS, folder=tmp_path)
    assert {start.step for start in outcome.starts} == {last}
    assert sorted(outcome.losses) == list(range(last + 1, STEPS + 1))
    check_parameters(outcome.parameters, STEPS)


def train_and_save(folder: Path, kill: Kill | None, told: Any) -> None:
    def save(booster: Booster, model: Any, optimizer: Any) -> None:
        booster.save_model(model, str(folder / "model"), shard=True)
        booster.save_optimizer(optimizer, str(folder / "optimizer"), shard=True)
        dist.barrier()
        before = {name: each.detach().clone() for name, each in model.unwrap().named_parameters()}
        for parameter in model.unwrap().parameters():
            parameter.data.zero_()
        booster.load_model(model, str(folder / "model"))
        booster.load_optimizer(optimizer, str(folder / "optimizer"))
        for name, each in model.unwrap().named_parameters():
            torch.testing.assert_close(each.detach(), before[name], rtol=0, atol=0)

    train(STEPS, kill, None, (), told, at_end=save)


def test_the_booster_saves_after_a_change_of_the_plan(tmp_path: Path) -> None:
    with Job(STEPS) as job:
        for node in ("big-0", "small-0", "small-1"):
            job.start(node, script=(train_and_save, tmp_path, Kill(4, "forward") if node == "big-0" else None))
        outcome = job.run()
    assert outcome.errors == [] and len(outcome.parameters) == 2
    check_parameters(outcome.parameters, STEPS)
    model = gpt2().double()
    saved: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "model").glob("*.bin"):
        saved |= torch.load(path, weights_only=True)
    assert not model.load_state_dict(saved, strict=False).missing_keys
    for name, expected in undisturbed(STEPS)[1].items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, rtol=1e-9, atol=1e-9)


class ChangedTexts(Texts):
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
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    changed = dict(Texts=ChangedTexts, gpt2=gpt2_with_dropout)
    with patch.multiple(elastic_jobs, **changed):
        train(STEPS, kill, None, joins, told)


def run(nodes: Sequence[str], kills: Mapping[int, Kill], joins: Mapping[str, int]) -> Outcome:
    def script_of(number: int) -> tuple[Any, ...]:
        return train_with_random_numbers, 17 + number, tuple(joins.values()), kills.get(number)

    return run_job(nodes, STEPS, joins=joins, script_of=script_of)


@pytest.fixture(scope="module")
def one_member() -> Mapping[str, Any]:
    outcome = run(["big-0"], {}, {})
    assert outcome.errors == []
    return outcome.parameters[0]


@pytest.mark.parametrize("dead", [0, 2] if IS_THOROUGH else [0])
def test_members_that_change_draw_the_same_random_numbers(one_member: Mapping[str, Any], dead: int) -> None:
    outcome = run(["big-0", "small-0", "small-1"], {dead: Kill(3, "backward")}, {"small-2": 5})
    assert outcome.errors == []
    assert len({change.after for of_member in outcome.recoveries for change in of_member}) == 2
    expected = torch.from_numpy(one_member["transformer.wte.weight"])
    for parameters in outcome.parameters:
        for name, found in parameters.items():
            reference = torch.from_numpy(one_member[name]) if name in one_member else expected
            size = min(len(found), len(reference))
            torch.testing.assert_close(torch.from_numpy(found)[:size], reference[:size], rtol=1e-9, atol=1e-9)
