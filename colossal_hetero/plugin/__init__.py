"""The Colossal-AI plugins."""

from .. import accelerator  # noqa: F401  (prepares Colossal-AI before a plugin imports it)
