"""What only ``make test-thorough`` does: more random examples, and each case with each method."""

from __future__ import annotations

import os

from hypothesis import settings

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def examples(*, ordinary: int, thorough: int) -> settings:
    """Settings for a test that runs ``ordinary`` examples, or ``thorough`` examples in the profile "thorough"."""
    return settings(max_examples=thorough if IS_THOROUGH else ordinary, deadline=None)
