"""Test modules name Colossal-AI before this package; what comes first here prepares it."""

import colossal_hetero.accelerator  # noqa: F401
