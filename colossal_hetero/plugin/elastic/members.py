"""Members of an elastic job: a process takes its place as its environment and the user's options say."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

from ...colossalai_support.accelerator import get_accelerator
from ...common.launch import end_with_parent
from ...common.text import say
from ...elastic.config import ElasticConfig
from ...elastic.environment import ElasticEnvironment, TorchrunPlace, check_torchrun
from ...elastic.membership import Membership
from ...elastic.process_groups import LaunchedState, ProcessGroups, find_each_other
from ...elastic.signals import FileNotice, SignalNotice
from ...elastic.world import JobEndedError, MembershipTiming, World
from ...planner.cluster.topology import Topology

KEEP_ALIVE_ATTEMPTS = 4
SECONDS_PER_LOOK = 0.1  # between two looks who else has started


def own_kind(cluster: Topology, node: str, local_rank: int) -> str:
    names = [each.name for each in cluster.nodes]
    if node not in names:
        raise ValueError(
            f"this process is on node {node}, which is not in the cluster file; it has {', '.join(names)}. Add the "
            "node to the cluster file of all nodes and start the job again, or start this process with one of these "
            "names (COLOSSAL_HETERO_NODE)"
        )
    devices = cluster.nodes[names.index(node)].devices
    if local_rank >= len(devices):
        raise ValueError(
            f"this process is number {local_rank + 1} on node {node}, which has {len(devices)} "
            f"device{'s' if len(devices) > 1 else ''} in the cluster file; start at most one process for each device"
        )
    return cluster.devices[devices[local_rank]].kind.name


class JobMember(Membership):
    """A worker of torchrun that is a member of the job whose store the environment names."""

    def __init__(self, config: ElasticConfig, cluster: Topology) -> None:
        place = ElasticEnvironment.from_environ()
        end_with_parent()  # if torchrun is killed, nobody would end this process
        check_torchrun(os.environ)
        assert config.last_call_seconds is not None
        self.kind = own_kind(cluster, place.node, place.local_rank)
        timing = MembershipTiming(
            keep_alive_seconds=config.dead_seconds / KEEP_ALIVE_ATTEMPTS,
            keep_alive_attempts=KEEP_ALIVE_ATTEMPTS,
            last_call_seconds=config.last_call_seconds,
            join_limit_seconds=config.join_seconds,
            collective_limit_seconds=config.timeout_seconds,
        )
        self._expected, self._start_seconds = config.max_members or len(cluster.devices), config.start_seconds
        self.node, order = place.node, [node.name for node in cluster.nodes]
        super().__init__(
            *(place.store_host, place.store_port, place.job, place.node),
            min_members=config.min_members,
            max_members=self._expected,
            timing=timing,
            node_order=order,
            launcher=place.launcher,
        )
        self._has_formed = False
        self._notices: list[FileNotice | SignalNotice]
        self._notices = [] if config.notice_file is None else [FileNotice(config.notice_file)]

    @property
    def board(self) -> Membership:
        return self

    @property
    def job(self) -> str:
        return self.identity()

    def form_world(self) -> Sequence[str]:
        """Form a world; returns the node of each rank. Ends the process if the job has ended."""
        if not self._has_formed:
            wait_for_the_first_world(self, self._expected, self._start_seconds)
        try:
            nodes = self.form().nodes
        except JobEndedError as error:
            print(error, file=sys.stderr)
            raise SystemExit(0) from None
        if not self._has_formed:
            self.count(FORMED, 1)  # processes that come from now on do not wait for others
            self._has_formed = True
            self._notices.append(SignalNotice())  # a process that is in no world yet ends by SIGTERM at once
        return nodes

    def is_broken(self) -> bool:
        return self.failure is not None

    def is_leaving(self) -> bool:
        return any(notice.is_given() for notice in self._notices)


STARTED, FORMED = "started", "in a world"  # numbers of processes: come before the first world, been in one


def wait_for_the_first_world(board: Membership, expected: int, limit_seconds: float) -> None:
    """Wait until ``expected`` processes are there (as the first one says), a world formed, or the limit is over."""
    if limit_seconds <= 0 or board.count(FORMED, 0):
        return
    number, deadline, shown = board.count(STARTED, 1), time.monotonic() + limit_seconds, 0
    while True:
        there = board.count(STARTED, 0)
        if number == 1 and there != shown:
            shown = there
            left = max(deadline - time.monotonic(), 0.0)
            waits = f"; waiting up to {left:.0f} s for the others" if there < expected else ""
            say(f"{there} of {expected} members are there{waits}")
        if there >= expected or time.monotonic() > deadline or board.count(FORMED, 0):
            return
        time.sleep(SECONDS_PER_LOOK)


SEED = 1024  # as in ``colossalai.launch``


class RestartedMember:
    """A worker of torchrun in the only world of its life."""

    board = None  # no place for messages outlives workers of torchrun

    def __init__(self, config: ElasticConfig, cluster: Topology) -> None:
        self._config, self._order = config, {node.name: number for number, node in enumerate(cluster.nodes)}
        self.place = TorchrunPlace.from_environ()
        self.kind = own_kind(cluster, self.place.node, self.place.local_rank)

    @property
    def job(self) -> str:
        return self.place.job

    @property
    def node(self) -> str:
        return self.place.node

    def form_world(self) -> Sequence[str]:
        """Connect the workers that torchrun has started; returns the node of each rank."""
        place, config = self.place, self._config
        if place.world_size < config.min_members:
            raise ValueError(
                f"torchrun has started {place.world_size} workers, fewer than min_members={config.min_members}; give "
                "torchrun --nnodes MIN:MAX with a higher MIN, or set min_members lower"
            )
        store = TCPStore(place.host, place.port, is_master=place.hosts_store, wait_for_workers=False)
        found = find_each_other(store, place.rank, place.world_size, place.node, config.join_seconds)
        numbers = [self._order.get(node, len(self._order)) for node in found.nodes]
        order = sorted(range(place.world_size), key=lambda rank: (numbers[rank], rank))
        nodes = tuple(found.nodes[rank] for rank in order)
        world = World(order.index(place.rank), place.world_size, 0, nodes)
        backend = get_accelerator().communication_backend
        groups = ProcessGroups(config.timeout_seconds)
        groups.initialize(dist.PrefixStore(f"colossal_hetero/{found.token}", store), world, backend)
        LaunchedState(place.host, place.port, SEED).enter(world)
        return nodes

    def _leave_it_to_torchrun(self, *_: Any) -> None:
        """torchrun notices who has ended, and starts and ends the others. The groups end with the process."""

    seal = fail = leave = depart = end_job = _leave_it_to_torchrun

    def _only_torchrun_knows(self) -> bool:
        """False: torchrun looks for processes that join, ends the others if one ends, and knows the reason of SIGTERM,
        which all workers get whenever it starts them again."""
        return False

    is_broken = is_somebody_waiting = is_leaving = _only_torchrun_knows


Members = JobMember | RestartedMember
