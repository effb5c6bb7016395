"""The two ways in which a job recovers, and who its members are in each."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...elastic.config import ElasticConfig
from ...elastic.environment import STORE
from .elastic_run import Build, ElasticRun
from .members import JobMember
from .restart_run import RestartRun
from .restarted_member import RestartedMember

__all__ = ["make_elastic_run"]


def make_elastic_run(config: ElasticConfig, node_order: Sequence[str], build: Build) -> ElasticRun:
    """The elastic run of this process, as its options and whoever has started it say.

    Args:
        config: the user's options.
        node_order: names of all nodes that may be members; ranks are in their order.
        build: makes the plugin for a world; see :class:`.ElasticRun`.

    Raises:
        ValueError: the process was not started in a way that fits the options.
    """
    if config.recovery == "in-process":
        return ElasticRun(JobMember(config, node_order), build, config.seed)
    if STORE in os.environ:  # started by colossal-hetero launch
        return RestartRun(config, JobMember(config, node_order), build, watches=False)
    return RestartRun(config, RestartedMember(config, node_order), build, watches=True)
