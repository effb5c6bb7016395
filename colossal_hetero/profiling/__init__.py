"""Measure models and devices, with model, optimizer and random state restored afterwards."""

from ..colossalai_support import accelerator  # noqa: F401  (prepares Colossal-AI before the modules below import it)
