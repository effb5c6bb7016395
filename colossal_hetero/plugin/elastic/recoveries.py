"""The two ways in which a job recovers, and who its members are in each."""

from __future__ import annotations

import os

from ...elastic.config import ElasticConfig
from ...elastic.environment import STORE
from ...planner.cluster.topology import Topology
from .elastic_run import Build, ElasticRun
from .members import JobMember
from .restart_run import RestartRun
from .restarted_member import RestartedMember

__all__ = ["elastic_run_of", "members_of"]


def members_of(config: ElasticConfig, cluster: Topology) -> JobMember | RestartedMember:
    """This process as a member of its job, as its options and whoever has started it say.

    Args:
        config: the user's options.
        cluster: all nodes that may be members; ranks are in their order.

    Raises:
        ValueError: the process was not started in a way that fits the options, or on a node that is not in the cluster.
    """
    if config.recovery == "in-process" or STORE in os.environ:  # started by colossal-hetero launch
        return JobMember(config, cluster)
    return RestartedMember(config, cluster)


def elastic_run_of(config: ElasticConfig, members: JobMember | RestartedMember, build: Build) -> ElasticRun:
    """The elastic run of this process.

    Args:
        config: the user's options.
        members: of the job.
        build: makes the plugin for a world; see :class:`.ElasticRun`.
    """
    if config.recovery == "in-process":
        return ElasticRun(members, build, config)
    return RestartRun(config, members, build, watches=isinstance(members, RestartedMember))
