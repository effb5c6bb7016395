"""Modules that the fork server of :mod:`tests.support.harness` loads once for all test processes."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import colossal_hetero.layers
import colossal_hetero.planner.search.make_plans
import colossal_hetero.plugin.hybrid.hybrid_plugin  # noqa: F401
import tests.support.planning
import tests.support.sharding
import tests.support.training  # noqa: F401
from colossal_hetero.profiling.batches import device_profiler

# Ranks measure how long passes take wherever a plugin divides batches. Tests on ranks do not need precise times.
assert device_profiler.MIN_SECONDS > 0.05
device_profiler.MIN_SECONDS = 0.05

# Without this, each garbage collection would go through all objects of these modules, which takes a third of a second,
# and would copy the memory pages that a rank shares with the server.
gc.collect()
gc.freeze()
