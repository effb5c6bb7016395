"""How many random examples a test with expensive ones runs: few in ``make test``, all in ``make test-thorough``."""

from __future__ import annotations

import os

from hypothesis import settings

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(*, ordinary: int, thorough: int) -> settings:
    """Settings for a test that runs ``ordinary`` examples, or ``thorough`` ones in the profile of that name."""
    return settings(max_examples=thorough if IS_THOROUGH else ordinary, deadline=None)
