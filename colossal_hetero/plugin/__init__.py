"""The Colossal-AI plugins."""

from ..colossalai_support import accelerator  # noqa: F401  (prepares Colossal-AI before a plugin imports it)
