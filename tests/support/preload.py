"""Modules that the fork server of :mod:`tests.support.harness` loads once for all test processes."""

import colossal_hetero.layers
import colossal_hetero.plugin.hybrid.hybrid_plugin  # noqa: F401
