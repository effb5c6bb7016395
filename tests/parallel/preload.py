"""Modules that the fork server of :mod:`tests.parallel.harness` loads once for all test processes."""

import colossalai.booster
import colossalai.shardformer.policies.auto_policy  # noqa: F401
import timm  # noqa: F401

import colossal_hetero.accelerator  # noqa: F401
