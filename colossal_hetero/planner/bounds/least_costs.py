"""The smaller one of each cost."""

from __future__ import annotations

from dataclasses import fields

import numpy as np

from ..profile.layer_costs import LayerCosts

__all__ = ["least_costs"]


def least_costs(one: LayerCosts, other: LayerCosts) -> LayerCosts:
    """The smaller one of each cost, block by block."""
    names = [field.name for field in fields(LayerCosts)]
    return LayerCosts(**{name: np.min([getattr(one, name), getattr(other, name)], axis=0) for name in names})
