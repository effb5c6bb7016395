"""Modules that the fork server of :mod:`tests.support.harness` loads once for all test processes."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import tests.support.planning
import tests.support.sharding
import tests.support.training  # noqa: F401
from colossal_hetero import BalanceConfig
from colossal_hetero.plugin.hybrid import hybrid_plugin
from colossal_hetero.profiling import device_profiler, rank_profiler

# isort: split
from colossalai.device.device_mesh import DeviceMesh

# Where a plugin divides batches, ranks measure the times of passes. Tests do not need precise times, so each size runs
# only a few times.
assert device_profiler.MIN_SECONDS > 0 and device_profiler.WINDOW_SECONDS > 0.01
assert rank_profiler.SYNCHRONIZED_SECONDS > 0 and device_profiler.REPEATS > 2 and rank_profiler.SYNCHRONIZATIONS > 2
device_profiler.MIN_SECONDS = rank_profiler.SYNCHRONIZED_SECONDS = 0.0
device_profiler.WINDOW_SECONDS = 0.01
device_profiler.REPEATS = rank_profiler.SYNCHRONIZATIONS = 2

# Ranks of tests share cores, so now and then one seems to be slow. Tests of balancing ask for it.
USERS_BALANCE = hybrid_plugin.DEFAULT_BALANCE
assert BalanceConfig(mode="auto", reshard_after=None, head=False) == hybrid_plugin.DEFAULT_BALANCE
hybrid_plugin.DEFAULT_BALANCE = BalanceConfig(mode="off")

# Colossal-AI copies the device mesh with the layout of each parameter that it shards. A mesh never changes, so one is
# enough for all. The copies take a third of the time of Booster.boost.
DeviceMesh.__deepcopy__ = lambda mesh, memo: mesh


# Garbage collections must not visit the objects of these modules. That would take a third of a second each time, and
# would copy the memory pages that a rank shares with the server.
gc.collect()
gc.freeze()
