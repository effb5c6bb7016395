"""What is decided before training: devices, their speed, and the batch that each gets. Free of torch."""

from .allocation import Allocation, Share, allocate
from .curves import Curve

__all__ = ["Allocation", "Curve", "Share", "allocate"]
