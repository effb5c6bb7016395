"""Archives of tensors, compared with what `torch.load` reads from them."""

from __future__ import annotations

import io

import pytest
import torch

from colossal_hetero.checkpoint.layer_files import ALIGNMENT, write_tensor


class OneWay(io.RawIOBase):
    """A stream that cannot seek, as a file that is written from start to end."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: object) -> int:
        self.content += memoryview(data).cast("B")  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]

    def tell(self) -> int:
        raise OSError("cannot seek")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("sizes", [(), (0,), (3,), (5, 7), (2, 3, 4)])
def test_torch_reads_an_archive(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    tensor = (3 * torch.randn(sizes, generator=torch.Generator().manual_seed(0))).to(dtype)
    data = tensor.reshape(-1).view(torch.uint8).numpy()
    stream = OneWay()
    offset = write_tensor(stream, data, dtype, sizes)
    read = torch.load(io.BytesIO(stream.content), weights_only=True)
    assert read.dtype == dtype and read.shape == tensor.shape and torch.equal(read, tensor)
    assert offset % ALIGNMENT == 0
    assert stream.content[offset : offset + len(data)] == data.tobytes()
