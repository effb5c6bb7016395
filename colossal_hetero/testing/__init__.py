"""Slow ranks on demand and CPU quotas: for experiments and for users' own tests."""

from .stragglers import Stragglers, cpu_quota, inject_stragglers, parse_slowdowns

__all__ = ["Stragglers", "cpu_quota", "inject_stragglers", "parse_slowdowns"]
