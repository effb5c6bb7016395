"""Processes that come, save together, and draw the same random numbers whoever computes; and jobs whose processes are
started again. They train like one process that nothing happens to."""

import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
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
from tests.support.elastic_jobs import QUICK, Job, Kill, Outcome, check_parameters, cluster, run_job, train
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
    outcome.check(STEPS)
    assert outcome.recoveries == [(), ()]
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
        job.run().check(STEPS)


def test_a_member_that_is_left_alone_keeps_the_state_until_another_one_comes() -> None:
    """Two members share the model. One is warned, the other takes its half, which is more than it may train with."""
    with Job(STEPS) as job:
        job.start("small-0")
        job.start("small-1")
        deadline = time.monotonic() + elastic_jobs.LIMIT_SECONDS
        while 1 in job.alive():
            assert time.monotonic() < deadline, job.outcome
            message = job.message()
            if message is not None and message[1] == "step" and message[2][0] == 4:
                job.members[1].terminate()
        steps = len(job.outcome.losses)
        assert job.alive() == [0] and steps < STEPS
        job.start("small-2")
        outcome = job.run()
    outcome.check(STEPS)
    assert outcome.ended == {0: 0, 1: 0, 2: 0}
    assert [(each.before, each.after) for each in outcome.changes] == [(2, 2)]


def train_impatiently(told: Any) -> None:
    """The script of members that wait for 2 s at most, and whose devices are too small."""
    whole = cluster()
    kinds = {each.kind.name: dataclasses.replace(each.kind, memory_bytes=4 * 10**7) for each in whole.devices}
    small = dataclasses.replace(
        whole, devices=tuple(dataclasses.replace(each, kind=kinds[each.kind.name]) for each in whole.devices)
    )
    train(STEPS, None, None, (), told, ElasticConfig(**QUICK, join_seconds=2.0), small)


def test_all_members_say_what_is_missing_if_nobody_comes() -> None:
    outcome = run_job(["big-0", "small-0"], 0, script=(train_impatiently,))
    assert len(outcome.errors) == 2
    for error in outcome.errors:
        assert "2 members, and no more came within 2 s: " in error
        assert "the model needs at least" in error or "no device can hold block" in error


def only_big(whole: ModelProfile = elastic_jobs.profile()) -> ModelProfile:  # noqa: B008  it is replaced later
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
    outcome.check(STEPS, first=last + 1)
    assert {start.step for start in outcome.starts} == {last}


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
    kills, nodes = [Kill(4, "forward"), None, None], ["big-0", "small-0", "small-1"]
    outcome = run_job(nodes, STEPS, script_of=lambda number: (train_and_save, tmp_path, kills[number]))
    outcome.check(STEPS)
    assert len(outcome.parameters) == 2
    model = gpt2().double()
    saved: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "model").glob("*.bin"):
        saved |= torch.load(path, weights_only=True)
    assert not model.load_state_dict(saved, strict=False).missing_keys
    for name, expected in elastic_jobs.undisturbed(STEPS)[1].items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, rtol=1e-9, atol=1e-9)


class ChangedTexts(elastic_jobs.Texts):
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
    assert len({change.after for change in outcome.changes}) == 2
    expected = torch.from_numpy(one_member["transformer.wte.weight"])
    for parameters in outcome.parameters:
        for name, found in parameters.items():
            reference = torch.from_numpy(one_member[name]) if name in one_member else expected
            size = min(len(found), len(reference))
            torch.testing.assert_close(torch.from_numpy(found)[:size], reference[:size], rtol=1e-9, atol=1e-9)


# Processes that are started again ------------------------------------------------------------------------------------


def _worker(
    told: elastic_jobs.Told, environment: Mapping[str, str], run: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    os.environ |= environment
    torch.set_num_threads(1)
    run(*arguments[:3], (), told, *arguments[3:])


class RestartedJob(Job):
    """A job whose processes all end when one ends, and are started again: what torchrun does, with forked processes.
    Its worlds come one after another; each is a call of :meth:`run_world`. ``memory`` is the folder of memory files,
    with a state of every so many steps, ``disk`` that of layer checkpoints, of every third step."""

    def __init__(
        self,
        memory: Path,
        steps: int,
        disk: Path | None = None,
        every: int = 1,
        name: str = "job",
        topology: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(steps, folder=disk, **options)
        elastic = ElasticConfig(recovery="restart", memory=memory, memory_every=every, timeout_seconds=20.0)
        self._name, self._more = name, (elastic, topology)

    def run_world(
        self, nodes: Sequence[str], kills: Mapping[int, Kill] | None = None, terminate: int | None = None
    ) -> Outcome:
        """A world, until all its processes have ended: when one of them fails, or has made the step ``terminate``, the
        others get SIGTERM. ``kills`` says where a process ends itself, by its number."""
        self.outcome, self.members = Outcome(), []
        for number, node in enumerate(nodes):
            environment = dict(
                RANK=str(number),
                WORLD_SIZE=str(len(nodes)),
                LOCAL_RANK=str(nodes[:number].count(node)),
                LOCAL_WORLD_SIZE=str(nodes.count(node)),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(self._server.port),
                TORCHELASTIC_RUN_ID=self._name,
                TORCHELASTIC_USE_AGENT_STORE="True",
                COLOSSAL_HETERO_NODE=node,
            )
            kill = (kills or {}).get(number)
            self._launch(_worker, environment, self._train, (self._steps, kill, self._folder, *self._more))
        deadline, is_ending = time.monotonic() + elastic_jobs.LIMIT_SECONDS, False
        while self.alive():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the world did not end: {self.outcome}")
            message = self.message()
            reached = message is not None and message[1] == "step" and message[2][0] == terminate
            if not is_ending and (reached or any(member.exitcode for member in self.members)):
                is_ending = True
                for member in self.members:
                    member.terminate()
        return self.finish()


def begin_and_end(outcome: Outcome) -> tuple[int, int]:
    """After which step all processes of a world have begun, and the last step that any of them has made."""
    (begin,) = {start.step for start in outcome.starts}
    return begin, max(outcome.losses, default=begin)


def test_processes_are_killed(tmp_path: Path) -> None:
    nodes = ["small-1", "big-0", "small-0"]  # torchrun numbers them in any order
    with RestartedJob(tmp_path / "memory", STEPS) as job:
        assert begin_and_end(job.run_world(nodes, {0: Kill(1, "forward")})) == (0, 1)
        assert begin_and_end(job.run_world(nodes, {1: Kill(4, "before commit")})) == (1, 4)
        assert begin_and_end(job.run_world(nodes, {2: Kill(6, "after commit")})) == (4, 7)  # the others make the step
        outcome = job.run_world(nodes)
    assert begin_and_end(outcome) == (7, STEPS) and set(outcome.ended.values()) == {0}
    check_parameters(outcome.parameters, STEPS)
    assert len(outcome.parameters) == 3
    assert not (tmp_path / "memory").exists()


def test_processes_of_zero_groups_are_killed(tmp_path: Path) -> None:
    """Each has a quarter of the optimizer's state, and a copy of another one. Memory files have the state only when the
    processes end: once within a step that is made."""
    nodes = list(elastic_jobs.BIG_NODES[:4])
    options = dict(topology=cluster(elastic_jobs.BIG_NODES), zero_stage=1, min_replicas=4)
    with RestartedJob(tmp_path / "memory", STEPS, every=50, **options) as job:
        assert begin_and_end(job.run_world(nodes, {1: Kill(2, "gathering")})) == (0, 2)
        shutil.rmtree(tmp_path / "memory" / "job" / "big-1")
        # After the third step, before what the script does then.
        assert begin_and_end(job.run_world(nodes, {2: Kill(5, "backward")})) == (2, 5)
        outcome = job.run_world([*nodes[:2], nodes[3]])
    assert begin_and_end(outcome) == (5, STEPS) and set(outcome.ended.values()) == {0}
    check_parameters(outcome.parameters, STEPS)
    assert len(outcome.parameters) == 3


def test_a_lost_memory_is_replaced_by_the_disk(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    with RestartedJob(memory, STEPS, disk=tmp_path / "disk") as job:
        assert begin_and_end(job.run_world(["big-0", "small-0"], {1: Kill(4, "before commit")})) == (0, 4)
        shutil.copytree(memory, tmp_path / "old")
        assert begin_and_end(job.run_world(["big-0", "small-0"], {0: Kill(8, "before commit")})) == (4, 8)
        shutil.rmtree(memory / "job" / "small-0")
        shutil.copytree(tmp_path / "old" / "job" / "small-0", memory / "job" / "small-0")
        shutil.copytree(tmp_path / "old" / "job" / "big-0", memory / "job" / "big-0", dirs_exist_ok=True)
        # Memory has steps 7 and 8 in part, and 4 as a whole; disks have 6.
        outcome = job.run_world(["small-0", "small-1", "small-2"])
    assert begin_and_end(outcome) == (6, STEPS)
    check_parameters(outcome.parameters, STEPS)


def test_all_processes_get_sigterm(tmp_path: Path) -> None:
    """Then the state after the last step is kept, although only every 50th is written while nothing happens."""
    memory, topology = tmp_path / "memory", cluster(["big-0", "small-0"], [1, 2])
    with RestartedJob(memory, STEPS, every=50, topology=topology) as job:
        outcome = job.run_world(["small-0", "big-0", "small-0"], terminate=4)
        assert set(outcome.ended.values()) == {128 + 15}
        reached = begin_and_end(outcome)[1]
        with RestartedJob(memory, 1, name="other", topology=topology) as other:
            assert begin_and_end(other.run_world(["big-0"])) == (0, 1)
        outcome = job.run_world(["small-0", "small-0"])
    assert begin_and_end(outcome) == (reached, STEPS) and 4 <= reached < STEPS
    check_parameters(outcome.parameters, STEPS)
    # Nodes that are not there at the end keep their files.
    assert {path.parent for path in memory.rglob("*.state")} == {memory / "job" / "big-0"}


def train_again(memory: Path, kill: Kill | None, told: Any) -> None:
    elastic = ElasticConfig(recovery="restart", memory=memory, max_members=3, dead_seconds=3.0, last_call_seconds=2.0)
    train(STEPS, kill, None, (), told, elastic)


def test_a_launched_member_that_is_warned_hands_over_what_only_it_holds(tmp_path: Path) -> None:
    """The machine of the second half of a pipeline is taken away, with its memory."""
    memory = tmp_path / "memory"
    with Job(STEPS) as job:
        for node in ("big-0", "small-0"):
            job.start(node, script=(train_again, memory, None))
        job.run(lambda _, kind, content: job.members[1].terminate() if kind == "step" and content[0] == 4 else None)
        assert [member.exitcode for member in job.members] == [1, 0]
        reached = max(job.outcome.losses)
        (folder,) = memory.glob("*/small-0")
        shutil.rmtree(folder)
        job.start("big-0", script=(train_again, memory, None))
        outcome = job.run()
    assert 4 <= reached < STEPS
    assert [start.step for start in outcome.starts] == [0, 0, reached]
    check_parameters(outcome.parameters, STEPS)


def test_members_of_a_launched_job_end_and_start_again(tmp_path: Path) -> None:
    memory, ends = tmp_path / "memory", list[int]()
    with Job(STEPS) as job:
        running = {job.start(node, script=(train_again, memory, None)) for node in ("small-1", "small-0")}
        kill = Kill(5, "before commit")
        while running:
            message = job.message()
            if message is not None and message[1] == "step" and len(job.members) == 2:
                running.add(job.start("big-0", script=(train_again, memory, kill)))
            for number in {number for number in running if job.members[number].exitcode is not None}:
                running.remove(number)
                ends.append(job.members[number].exitcode)
                if ends[-1]:
                    again = kill if job.nodes[number] == "big-0" and -9 not in ends else None
                    running.add(job.start(job.nodes[number], script=(train_again, memory, again)))
        outcome = job.finish()
    assert sorted(ends) == [-9, 0, 0, 0, 1, 1, 1, 1]
    assert sorted({start.step for start in outcome.starts})[-1] == 5
    check_parameters(outcome.parameters, STEPS)
    assert len(outcome.parameters) == 3
    assert not memory.exists()
