"""Memory of each layer for one micro-batch: kept for backward (autograd's saved tensors), output, and temporaries.
Temporaries are the allocator's peak of a layer's passes without what was held before and what the layer keeps. They
contain the gradient of its output, and those of its parameters before they are added to earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from .layer_passes import LayerPasses
from .memory import peak_bytes, reset_peak, used_bytes


@dataclass
class SavedBytes:
    excluded: set[int]
    storages: dict[int, int] = field(default_factory=dict)
    """Bytes of each storage, by address. All live until backward, so an address is not used again."""

    @property
    def total(self) -> int:
        return sum(self.storages.values())

    def total_without(self, tensor: Tensor) -> int:
        return self.total - self.storages.get(tensor.untyped_storage().data_ptr(), 0)

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.excluded:
            self.storages[storage.data_ptr()] = storage.nbytes()


@contextmanager
def saved_bytes(excluded: Iterable[Tensor]) -> Iterator[SavedBytes]:
    """Count the tensors that forward passes in the block save for backward; not those that a model keeps itself."""
    saved = SavedBytes({tensor.untyped_storage().data_ptr() for tensor in excluded})

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one micro-batch, ``[layers]``: the part before the blocks, each block, the part after them."""

    kept: list[int]
    outputs: list[int]
    temporaries: list[int]  # empty if they were not measured


def measure_memory(
    passes: LayerPasses,
    model: nn.Module,
    kinds: Sequence[int],
    singles: Mapping[int, int],
    counting: torch.device | None,
) -> LayerMemory:
    """Run each kind of block once (``singles``), and the parts before and after the blocks, of ``kinds`` ``[blocks]``.
    Parameters must have gradients already. ``counting``: the device, if its allocator counts the bytes of each tensor;
    None: temporaries are not measured."""
    shared = [*model.parameters(), *model.buffers(), *passes.shared_tensors()]
    kept_of: dict[int, int] = {}
    temporaries_of: dict[int, int] = {}
    for kind, block in singles.items():
        with saved_bytes(shared) as saved:
            hidden = passes.input_of(block).detach().clone().requires_grad_()
            output = passes.forward(hidden, block, 1)
            own = saved.total_without(hidden)
            # The pipeline schedule keeps the input of a stage until its backward, even if no block needs it.
            saved.add(hidden)
            kept_of[kind] = saved.total
        del output, hidden
        if counting is not None:
            temporaries_of[kind] = _of_block(passes, block, own, counting)
    with saved_bytes(shared) as saved:
        halves: list[int] = []
        ends = passes.forward_ends(on_after=lambda: halves.append(saved.total))
        before, after = halves[0], saved.total - halves[0]
        own_after = saved.total_without(ends.last) - before
    del ends
    temporaries = []
    if counting is not None:
        first, last = _of_ends(passes, before, own_after, counting)
        temporaries = [first, *(temporaries_of[kind] for kind in kinds), last]
    # The input of each block, and the output of the last one, which is as large as its input or not sent on.
    inputs = [passes.input_of(block) for block in (*range(len(kinds)), len(kinds) - 1)]
    handed_on = [each.numel() * each.element_size() for each in inputs]
    return LayerMemory([before, *(kept_of[kind] for kind in kinds), after], [*handed_on, 0], temporaries)


def _of_block(passes: LayerPasses, block: int, kept_bytes: int, device: torch.device) -> int:
    hidden = passes.input_of(block).detach().requires_grad_()
    held = used_bytes(device)
    reset_peak(device)
    output = passes.forward(hidden, block, 1)
    output.backward(torch.ones_like(output))
    return max(peak_bytes(device) - held - kept_bytes, 0)


def _of_ends(passes: LayerPasses, kept_before: int, kept_after: int, device: torch.device) -> tuple[int, int]:
    """Temporaries of the parts before and after the blocks; what they keep does not contain their inputs."""
    held = [used_bytes(device)]
    peaks: list[int] = []

    def next_part() -> None:
        peaks.append(peak_bytes(device))
        held.append(used_bytes(device))
        reset_peak(device)

    reset_peak(device)
    ends = passes.forward_ends(on_before=next_part, on_after=next_part)
    next_part()
    ends.loss.backward()
    next_part()
    if ends.hidden.requires_grad:
        ends.hidden.backward(torch.ones_like(ends.hidden))
    next_part()
    # Forward before, between and after the blocks, then backward after and before them, which starts with what is kept.
    needed = [peak - start for peak, start in zip(peaks, held, strict=False)]
    return max(needed[0] - kept_before, needed[4], 0), max(needed[2] - kept_after, needed[3], 0)


def split_temporaries(by_size: Mapping[int, Sequence[int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes per sample, the growth from the smallest to the largest size (of one size, all), and fixed bytes
    ``[layers]``, from bytes by micro-batch. Their sum is at least what was measured for every size."""
    sizes = np.array(sorted(by_size))
    measured = np.array([by_size[size] for size in sizes.tolist()], dtype=float)
    if len(sizes) == 1:
        per_sample, fixed = np.ceil(measured[0] / sizes[0]), np.zeros_like(measured[0])
    else:
        per_sample = np.ceil(np.maximum(measured[-1] - measured[0], 0.0) / (sizes[-1] - sizes[0]))
        fixed = np.maximum((measured - per_sample * sizes[:, None]).max(axis=0), 0.0)
    return tuple(per_sample.astype(int).tolist()), tuple(fixed.astype(int).tolist())
