"""This process as a member of an elastic job, as its environment and the user's options say."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ...elastic.config import ElasticConfig
from ...elastic.environment import ElasticEnvironment
from ...elastic.membership.errors import JobEndedError
from ...elastic.membership.membership import Membership
from ...elastic.membership.timing import MembershipTiming
from ...elastic.notices import AnyNotice, FileNotice, Notice, SignalNotice
from ...planner.cluster.topology import Topology
from .joining.first_world import a_world_has_formed, wait_for_the_first_world
from .joining.new_kinds import own_kind

__all__ = ["JobMember"]

KEEP_ALIVE_ATTEMPTS = 4


class JobMember:
    """A member of the job that the environment names (``colossal-hetero launch`` sets it).

    Args:
        config: the user's options.
        cluster: all nodes that may be members; ranks are in their order.

    Raises:
        ValueError: the environment names no place in a job, or one that is not in the cluster.
    """

    def __init__(self, config: ElasticConfig, cluster: Topology) -> None:
        place = ElasticEnvironment.from_environ()
        assert config.last_call_seconds is not None
        self.kind = own_kind(cluster, place.node, place.local_rank)
        """The kind of this process's device in the cluster."""
        node_order = [node.name for node in cluster.nodes]
        timing = MembershipTiming(
            keep_alive_seconds=config.dead_seconds / KEEP_ALIVE_ATTEMPTS,
            keep_alive_attempts=KEEP_ALIVE_ATTEMPTS,
            last_call_seconds=config.last_call_seconds,
            join_limit_seconds=config.join_seconds,
            collective_limit_seconds=config.timeout_seconds,
        )
        self.node = place.node
        """Name of this node."""
        self.membership = Membership(
            place.store_host,
            place.store_port,
            place.job,
            place.node,
            min_members=config.min_members,
            max_members=config.max_members or len(cluster.devices),
            timing=timing,
            node_order=node_order,
        )
        self._expected, self._start_seconds = config.max_members or len(cluster.devices), config.start_seconds
        self._has_formed = False
        notices: list[Notice] = [SignalNotice()]
        if config.notice_file is not None:
            notices.append(FileNotice(config.notice_file))
        self._notice = AnyNotice(*notices)

    @property
    def board(self) -> Membership:
        """Where all members of the job can read."""
        return self.membership

    @property
    def job(self) -> str:
        """A name that no other job on this node has."""
        return self.membership.identity()

    def form(self) -> Sequence[str]:
        """Form a world; returns the node of each member, by rank. Ends the process if the job has ended."""
        if not self._has_formed:
            wait_for_the_first_world(self.membership, self._expected, self._start_seconds)
        try:
            nodes = self.membership.form().nodes
        except JobEndedError as error:
            print(error, file=sys.stderr)
            raise SystemExit(0) from None
        if not self._has_formed:
            a_world_has_formed(self.membership)
            self._has_formed = True
        return nodes

    def seal(self) -> None:
        """All groups of this world exist."""
        self.membership.seal()

    def fail(self, reason: str) -> None:
        """Tell the others that this world is broken."""
        self.membership.fail(reason)

    def is_broken(self) -> bool:
        """Whether a member of this world is known to be lost."""
        return self.membership.failure is not None

    def leave(self) -> None:
        """Drop all groups of this world."""
        self.membership.leave()

    def depart(self) -> None:
        """Leave the job."""
        self.membership.depart()

    def end_job(self) -> None:
        """The job has ended: processes that come later end at once."""
        self.membership.end_job()

    def is_somebody_waiting(self) -> bool:
        """Whether a process waits to join."""
        return self.membership.is_somebody_waiting()

    def is_leaving(self) -> bool:
        """Whether this member was told that it will be taken away."""
        return self._notice.is_given()
