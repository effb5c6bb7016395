"""Slow ranks on demand and CPU quotas: for experiments and for users' own tests."""

from ..common.text import parse_rank_factors as parse_slowdowns
from .stragglers import Stragglers, cpu_quota, inject_stragglers

__all__ = ["Stragglers", "cpu_quota", "inject_stragglers", "parse_slowdowns"]
