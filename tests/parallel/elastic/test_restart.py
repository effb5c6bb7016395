"""A job whose processes are started again trains like one process that nothing happens to."""

import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from colossal_hetero import ElasticConfig
from tests.support import elastic_jobs
from tests.support.elastic_jobs import LIMIT_SECONDS, Job, Kill, Outcome, Told, check_parameters, cluster, train

STEPS = 10


def _worker(told: Told, environment: Mapping[str, str], run: Callable[..., None], arguments: tuple[Any, ...]) -> None:
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
        deadline, is_ending = time.monotonic() + LIMIT_SECONDS, False
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
