"""Numbers of a device that the host reads later, so that it need not wait for the device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LateNumbers"]


class LateNumbers:
    """A copy of ``numbers [n]`` on the host, which is started now and read later."""

    def __init__(self, numbers: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            # Only a copy into pinned memory lets the host continue.
            self._host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._host.copy_(numbers, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = numbers.cpu()

    def read(self) -> list[float]:
        """The numbers; it waits if the device has not computed them yet."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
