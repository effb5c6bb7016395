"""Keep the tensors that a forward pass saves for its backward pass outside the device's memory.

On a GPU they are kept in the memory of the host, and on a CPU in a temporary file. The results are the same, bit for
bit, but forward and backward take longer.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["stored_outside"]

MIN_BYTES = 1 << 16
"""Smaller tensors stay where they are."""


@contextmanager
def stored_outside(model: nn.Module) -> Iterator[None]:
    """In the block, autograd saves tensors outside their device's memory. The tensors of ``model`` itself stay."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        small = tensor.numel() * tensor.element_size() < MIN_BYTES
        if small or tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in own:
            return tensor
        return _in_file(tensor) if tensor.device.type == "cpu" else _on_host(tensor)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _on_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy ``tensor`` to the host; the function that copies it back."""
    device, copy = tensor.device, tensor.detach().to("cpu")
    return lambda: copy.to(device)


def _in_file(tensor: Tensor) -> Callable[[], Tensor]:
    """Write ``tensor`` to a temporary file, which is removed with the graph; the function that reads it again."""
    # Elements are written in the order of the memory, so that the copy has the same strides.
    strides: tuple[int, ...] = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dim: -strides[dim])
    dense = tensor.detach().permute(order).contiguous()
    shape, dtype = dense.shape, dense.dtype
    back = [order.index(dim) for dim in range(tensor.ndim)]
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when autograd releases the function below
    file.write(dense.view(-1).view(torch.uint8).numpy().data)

    def read() -> Tensor:
        data = torch.empty(shape.numel(), dtype=dtype)
        file.seek(0)
        file.readinto(data.view(torch.uint8).numpy().data)
        return data.view(shape).permute(back)

    return read
