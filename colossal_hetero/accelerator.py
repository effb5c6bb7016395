"""Lets Colossal-AI work on a CPU, and without its warnings: import this module before Colossal-AI."""

from .colossalai_support.accelerator import HeteroCpuAccelerator, get_accelerator

__all__ = ["HeteroCpuAccelerator", "get_accelerator"]
