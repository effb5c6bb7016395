"""A job whose members die, join and leave trains like one process that nothing happens to."""

import itertools
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from colossalai.booster import Booster
from torch import nn

from benchmarks.elastic.soak import AIM, check_folder, soak
from colossal_hetero import ElasticConfig
from colossal_hetero.plugin.elastic import elastic_run
from colossal_hetero.plugin.replicas.replica_gradients import ReplicaGradients
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2, loss_of
from tests.support import elastic_jobs
from tests.support.elastic_jobs import BIG_NODES, QUICK, Job, Kill, Outcome, Texts, check_parameters, run_job, train
from tests.support.random_examples import IS_THOROUGH

STEPS = 10


def check(
    nodes: Sequence[str], kills: Mapping[int, Kill], joins: Mapping[str, int], warned: Mapping[int, int], **options: Any
) -> Outcome:
    outcome = run_job(nodes, STEPS, kills, joins, warned, **options)
    assert {number for number, code in outcome.ended.items() if code} == set(kills)
    outcome.check(STEPS)
    return outcome


@pytest.mark.parametrize(
    ("kills", "changes"),
    [
        ({1: Kill(2, "forward"), 3: Kill(7, "sums")}, [(3, 2), (2, 3), (3, 2)]),
        ({2: Kill(2, "backward"), 3: Kill(7, "before commit")}, [(3, 2), (2, 3), (3, 2)]),
        ({0: Kill(2, "after commit")}, [(3, 2), (2, 3)]),
    ],
    ids=["forward and sums", "backward and commit", "rank 0 after the commit"],
)
def test_members_die_and_join(kills: Mapping[int, Kill], changes: list[tuple[int, int]]) -> None:
    outcome = check(["big-0", "small-0", "small-1"], kills, {"small-2": 4}, {})
    assert changes in [[(each.before, each.after) for each in of_member] for of_member in outcome.recoveries]
    repeated = {(each.before < each.after, each.iterations_repeated) for each in outcome.changes}
    assert (True, 0) in repeated and (True, 1) not in repeated
    assert (False, 1) in repeated  # by those that had begun another iteration when the member was lost
    (joined,) = (start for start in outcome.starts if start.step)
    assert joined.received_bytes > 0


def test_a_member_that_is_warned_hands_over_what_only_it_holds() -> None:
    outcome = check(["big-0", "small-0"], {}, {}, {1: 4})
    ((change,),) = outcome.recoveries
    assert (change.before, change.after, change.iterations_repeated) == (2, 1, 0)
    assert change.received_bytes > 0


def test_a_lost_state_is_named_and_a_new_job_continues_from_the_checkpoint(tmp_path: Path) -> None:
    outcome = run_job(["big-0", "small-0"], STEPS, {1: Kill(5, "backward")}, folder=tmp_path)
    (error,) = outcome.errors
    assert "the members that are left do not hold block-000" in error and "latest checkpoint" in error
    assert max(outcome.losses) == 5
    outcome = run_job(["big-0", "small-0", "small-1"], STEPS, {2: Kill(7, "sums")}, folder=tmp_path)
    outcome.check(STEPS, first=4)


@pytest.mark.parametrize("dead", [0, 1] if IS_THOROUGH else [0])
def test_nobody_waits_for_the_file_of_a_member_that_is_lost(dead: int, tmp_path: Path) -> None:
    """All members are in ``plugin.wait_for_saves``, so no collective fails. Messages are in the memory of rank 0."""
    outcome = run_job(["big-0", "small-0", "small-1"], STEPS, {dead: Kill(3, "saving")}, folder=tmp_path)
    outcome.check(STEPS)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000006", "step-00000009"]


def train_with_spares(kill: Kill | None, told: Any) -> None:
    train(STEPS, kill, None, (), told, ElasticConfig(**QUICK, max_members=3, start_seconds=60.0))


def run_with_spare(dead: int | None) -> Outcome:
    with Job(STEPS) as job:
        for number, node in enumerate(["big-0", "small-0", "small-1", "small-2"]):
            job.start(node, script=(train_with_spares, Kill(4, "backward") if number == dead else None))
            while number == 2 and job.outcome.starts[2:] == []:  # the first three are the members
                job.message()
        return job.run()


def test_a_spare_that_takes_the_place_gives_the_same_bits() -> None:
    expected = run_with_spare(None)
    assert expected.errors == [] and [len(each) for each in expected.recoveries] == [0, 0, 0]
    bits = {name: each for parameters in expected.parameters for name, each in parameters.items()}
    for dead in (1, 2) if IS_THOROUGH else (2,):
        found = run_with_spare(dead)
        assert found.errors == []
        assert [(each.before, each.after, each.iterations_repeated) for each in found.changes] == [(3, 3, 1)] * 2
        for parameters in found.parameters:
            for name, each in parameters.items():
                assert np.array_equal(each, bits[name]), f"{name}, member {dead} is lost"


FROZEN_STEPS = 16


def train_slowly(told: Any) -> None:
    train(FROZEN_STEPS, None, None, (), told, after_step=lambda *_: time.sleep(0.1))


@pytest.mark.parametrize("frozen", [0, 1, 2] if IS_THOROUGH else [0])
def test_a_frozen_process_that_wakes_ends_without_a_change_of_the_others(frozen: int) -> None:
    with Job(FROZEN_STEPS, (train_slowly,)) as job:
        for node in ("big-0", "small-0", "big-1"):
            job.start(node)
        signals = [(signal.SIGSTOP, 4, 3), (signal.SIGCONT, 8, 2)]

        def send(_: int, kind: str, content: list[Any]) -> None:
            if kind == "step" and signals and content[0] >= signals[0][1] and content[1] == signals[0][2]:
                os.kill(job.members[frozen].pid, signals.pop(0)[0])

        outcome = job.run(send)
    assert signals == []
    (error,) = outcome.errors
    assert "this process was taken for dead at step" in error and "start it again to join them" in error
    changes = [[(each.before, each.after) for each in of_member] for of_member in outcome.recoveries]
    assert len(changes) == 2 and all(each[-1] == (3, 2) for each in changes), changes
    check_parameters(outcome.parameters, FROZEN_STEPS)


def test_a_process_that_comes_too_late_ends() -> None:
    outcome = run_job(["big-0"], 2, joins={"small-0": 2})
    assert outcome.errors == [] and outcome.ended == {0: 0, 1: 0}
    assert len(outcome.parameters) == 1


def train_and_fail(told: Any) -> None:
    commit = ReplicaGradients.commit

    def failing(gradients: ReplicaGradients, *args: Any) -> Any:
        if gradients.exchange.__self__.version == 2:  # type: ignore[attr-defined]
            raise RuntimeError("Connection closed by peer")
        return commit(gradients, *args)

    with patch.object(ReplicaGradients, "commit", failing):
        train(4, None, None, (), told, ElasticConfig(dead_seconds=0.3, last_call_seconds=0.1))


def test_a_step_that_always_fails_ends_the_job() -> None:
    outcome = run_job(["big-0"], 0, script=(train_and_fail,))
    (error,) = outcome.errors
    assert "step 3 has failed 3 times, although all members were there" in error
    assert sorted(outcome.losses) == [1, 2]


# ZeRO -----------------------------------------------------------------------------------------------------------------
# Of three replicas and more, none holds all shards of the optimizer's state. Masters are in fp64 here.

ZERO = dict(zero_stage=1, topology=elastic_jobs.cluster(BIG_NODES), min_replicas=4)


@pytest.mark.parametrize(
    ("kills", "joins", "warned"),
    [
        # One after the other, down to a single member, which holds everything.
        ({1: Kill(2, "gathering"), 3: Kill(4, "sums"), 0: Kill(6, "gathered")}, {}, {}),
        ({2: Kill(2, "backward"), 0: Kill(5, "before commit")}, {"big-4": 3}, {1: 7}),
        # It joins while the others have made the step, and it begins behind this step.
        ({1: Kill(2, "gathering")}, {"big-4": 2}, {2: 5}),
    ],
    ids=["to one member", "backward, commit, warned", "joins in a step"],
)
def test_any_member_of_a_zero_group_may_be_lost(
    kills: Mapping[int, Kill], joins: Mapping[str, int], warned: Mapping[int, int]
) -> None:
    outcome = check(BIG_NODES[:4], kills, joins, warned, **ZERO)
    if 1 in kills and kills[1].phase == "gathering":  # the step is not made twice
        lost = [each for each in outcome.changes if each.version == 3]
        assert lost and not any(each.iterations_repeated for each in lost)


@pytest.mark.parametrize("phase", ["moving", "moved"])
def test_a_member_of_a_zero_group_dies_while_another_joins(phase: str, tmp_path: Path) -> None:
    def at_message(_: int, kind: str, content: list[Any]) -> None:
        if kind == "step" and content[0] == 3 and len(job.members) == 4:
            job.doom(1, phase)
            job.start("big-4")

    with Job(STEPS, joins=(3,), dooms=tmp_path, **ZERO) as job:
        for node in BIG_NODES[:4]:
            job.start(node)
        outcome = job.run(at_message)
    outcome.check(STEPS)
    assert len(outcome.parameters) == 4


def test_a_member_dies_in_passes_that_are_repeated() -> None:
    outcome = check(BIG_NODES[:4], {0: Kill(4, "sums"), 1: Kill(4, "backward", recoveries=1)}, {}, {}, **ZERO)
    assert [(each.version, each.iterations_repeated) for each in outcome.changes] == [(4, 1)] * 4


def train_and_miss_a_commit(misses: bool, folder: Path, options: Mapping[str, Any], told: Any) -> None:
    """The script of members, of which those that miss it lose the commit of the third step, once all four have it."""
    exchange, calls = elastic_run.exchange, itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        commit = exchange(*args, **kwargs)
        if next(calls) == 3:
            (folder / str(os.getpid())).touch()
            while misses and len(os.listdir(folder)) < 4:
                time.sleep(0.01)
            if misses:
                raise RuntimeError("Connection closed by peer")
        return commit

    with patch.object(elastic_run, "exchange", failing):
        train(STEPS, None, None, (), told, **options)


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_member_that_misses_the_commit_makes_the_step_alone(zero_stage: int, tmp_path: Path) -> None:
    """The schedule changes the learning rate after this step, which some members reach before the recovery."""
    options = ZERO | dict(zero_stage=zero_stage)
    outcome = run_job(
        BIG_NODES[:4], STEPS, script_of=lambda number: (train_and_miss_a_commit, number in (1, 2), tmp_path, options)
    )
    outcome.check(STEPS)
    assert {(each.before, each.after, each.version) for each in outcome.changes} == {(4, 4, 3)}
    # Those that make the step alone do not repeat its passes.
    assert sum(not each.iterations_repeated for each in outcome.changes) >= 2


def test_zero_in_replicas_of_unequal_depth() -> None:
    check(["big-0", "small-0", "small-1", "small-2"], {1: Kill(3, "gathering")}, {"big-1": 6}, {}, zero_stage=1)


def test_two_neighbors_lost_at_once_are_named_and_a_new_job_continues_from_the_checkpoint(tmp_path: Path) -> None:
    """Shard 1 of 4 is on the first two members."""
    kills = {0: Kill(5, "backward"), 1: Kill(5, "backward")}
    outcome = run_job(BIG_NODES[:4], STEPS, kills, folder=tmp_path, **ZERO)
    assert len(outcome.errors) == 2
    for error in outcome.errors:
        assert "the members that are left do not hold all elements of" in error and "latest checkpoint" in error
    # A checkpoint of ZeRO's masters in another plan, without ZeRO, and back.
    outcome = run_job(["big-0", "small-0"], 7, folder=tmp_path)
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(4, 8))
    run_job(BIG_NODES[:3], STEPS, folder=tmp_path, **ZERO).check(STEPS, first=7)


# Evaluations ----------------------------------------------------------------------------------------------------------


def batch() -> dict[str, torch.Tensor]:
    samples = [Texts()[index] for index in range(8)]
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


def gpt2_with_empty_buffer() -> nn.Module:
    model = gpt2()
    model.transformer.register_buffer("nothing", torch.empty(0, 4))
    return model


def train_and_evaluate(kill: Kill | None, told: Any) -> None:
    def evaluate(booster: Booster, model: Any) -> None:
        model.eval()
        with torch.no_grad():
            batches = iter([batch(), batch()])
            for _ in range(2):
                result = booster.execute_pipeline(batches, model, loss_of, return_loss=True)
                told.put(("evaluated", booster.plugin.version, result["loss"] and float(result["loss"])))
        assert not model.training
        model.train()

    with patch.object(elastic_jobs, "gpt2", gpt2_with_empty_buffer):
        train(STEPS, kill, None, (), told, after_step=evaluate)


def test_a_batch_is_evaluated_again_if_a_member_is_lost() -> None:
    """A stage of a pipeline is lost, then a whole replica, which the others notice after their own passes."""
    found: dict[int, list[float]] = {}

    def at_message(_: int, kind: str, content: list[Any]) -> None:
        if kind == "evaluated" and content[1] is not None:
            found.setdefault(content[0], []).append(content[1])

    with Job(STEPS) as job:
        for node, step in (("big-0", 6), ("small-0", 2), ("small-1", None), ("big-1", None)):
            job.start(node, script=(train_and_evaluate, step and Kill(step, "evaluation")))
        outcome = job.run(at_message)
    outcome.check(STEPS)
    assert [outcome.ended[number] for number in range(4)] == [-9, -9, 0, 0]
    changes = [(each.before, each.after, each.iterations_repeated) for each in outcome.changes]
    assert sorted(changes) == [(3, 2, 0)] * 2 + [(4, 3, 0)] * 2
    assert sorted(found) == list(range(1, STEPS + 1))
    for step, losses in found.items():
        model = gpt2().double()
        model.load_state_dict(elastic_jobs.undisturbed(step)[1], strict=False)
        with torch.no_grad():
            expected = loss_of(model(**batch()), batch()).item()
        assert losses == pytest.approx([expected] * len(losses), abs=1e-6)


# Many changes -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not IS_THOROUGH, reason="takes long: make test-thorough")
@pytest.mark.parametrize("zero", [False, True], ids=["replicas", "ZeRO"])
def test_members_that_come_and_go_at_random(zero: bool, tmp_path: Path) -> None:
    steps, kills = (150, 20) if zero else (26, 2)
    happened, job = soak(kills, steps, seed=1, folder=tmp_path, zero=zero)
    outcome = job.outcome
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, steps + 1))
    assert any(kind.startswith("kill") for kind in happened) and "join" in happened
    check_parameters(outcome.parameters, steps, AIM)
    assert check_folder(tmp_path / "checkpoints")
