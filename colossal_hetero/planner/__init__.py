"""What is decided before training: devices, their speed, and the batch that each gets. Free of torch."""

from .batches.allocation import Allocation, Share, allocate
from .batches.time_curve import Curve

__all__ = ["Allocation", "Curve", "Share", "allocate"]
