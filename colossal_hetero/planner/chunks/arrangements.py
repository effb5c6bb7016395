"""All ways to form pipelines of equal length from a few tensor-parallel groups."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

__all__ = ["MAX_GROUPS", "Ranks", "all_arrangements"]

Ranks = tuple[tuple[tuple[int, ...], ...], ...]
"""``[replicas][stages][tensor parallel]``."""

MAX_GROUPS = 5
"""With more groups there are too many ways: 5 groups form pipelines of at least 2 stages in 380 ways."""


def all_arrangements(groups: Sequence[tuple[int, ...]]) -> Iterator[Ranks]:
    """Every choice of groups in every order of stages, at least 2. The order of replicas does not matter."""
    for stages in range(2, len(groups) + 1):
        rows = list(itertools.permutations(groups, stages))
        for replicas in range(1, len(groups) // stages + 1):
            for chosen in itertools.combinations(rows, replicas):
                if len(set(itertools.chain(*chosen))) == stages * replicas:
                    yield chosen
