"""A group's share of every micro-batch, and the loss and outputs of all groups together.

The schedule of a rank runs the samples of its own group only, in as many micro-batches as those of all other ranks. The
loss of a group with m of the n samples of a micro-batch counts m / n. So the sum over groups is the mean over samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline.schedule._utils import get_batch_size, tree_flatten_hf
from torch import Tensor
from torch.utils._pytree import tree_map, tree_unflatten

from ...io.text import count
from .sample_ranges import GroupPlace, first_too_narrow, micro_batch_sizes, sample_range

__all__ = ["MicroBatchShares"]

Execute = Callable[[Iterator[Any], Callable[[Any, Any], Tensor]], dict[str, Any]]
"""Runs a schedule on batches, with a criterion; returns ``loss`` and ``outputs``, which may be None."""


class MicroBatchShares:
    """Runs a rank's share of the batches of its replica.

    Args:
        place: of this rank.
        micro_batch: samples of a micro-batch, of all groups together.
        group: the ranks of this stage at the same place in their tensor-parallel groups, in the order of the groups.
            Used in the last stage only.
        begin: called with the samples of each micro-batch, before the passes of a batch.
    """

    def __init__(
        self,
        place: GroupPlace,
        micro_batch: int,
        group: dist.ProcessGroup | None,
        begin: Callable[[Sequence[int]], None],
    ) -> None:
        self._place, self._micro_batch, self._group, self._begin = place, micro_batch, group, begin

    def run(self, execute: Execute, batches: Iterator[Any], criterion: Callable[[Any, Any], Tensor]) -> dict[str, Any]:
        """Run ``execute`` on this rank's share of ``batches``, of which it takes one.

        Args:
            execute: runs the schedule.
            batches: of the replica.
            criterion: ``(outputs, inputs) -> mean loss``, of any samples.

        Returns:
            As ``execute`` without widths: ``loss`` and ``outputs`` are those of the whole batch, on all ranks of the
            last stage. On other ranks, and if ``execute`` does not return them, they are None.

        Raises:
            ValueError: a micro-batch has fewer samples than a stage has groups, or the outputs are not by sample.
        """
        if not self._place.is_divided:
            return execute(batches, criterion)
        sizes: list[int] = []
        weights: list[float] = []

        def own() -> Iterator[Any]:
            for batch in batches:
                sizes[:] = self._sizes(batch)
                weights[:] = [len(self._rows(size, self._place.group)) / size for size in reversed(sizes)]
                self._begin(sizes)
                yield self._share(batch, sizes)

        result = execute(own(), lambda outputs, inputs: criterion(outputs, inputs) * weights.pop())
        if self._place.width > 1:
            if result["loss"] is not None:
                dist.all_reduce(result["loss"], group=self._group)
            if result["outputs"] is not None:
                result["outputs"] = self._whole(result["outputs"], sizes)
        return result

    def _sizes(self, batch: Any) -> tuple[int, ...]:
        samples = get_batch_size(batch)
        sizes = micro_batch_sizes(samples, self._micro_batch)
        stage = first_too_narrow(sizes, self._place.widths)
        if stage is not None:
            width = self._place.widths[stage]
            raise ValueError(
                f"a batch of {count(samples, 'sample')} has a micro-batch of {min(sizes)}, but stage {stage} divides "
                f"each micro-batch over {width} tensor-parallel groups, and each needs a sample; give a multiple of "
                f"{self._micro_batch} samples, or one with a rest of at least {max(self._place.widths)}"
            )
        return sizes

    def _rows(self, size: int, group: int) -> range:
        return sample_range(size, self._place.width, group)

    def _share(self, batch: Any, sizes: Sequence[int]) -> Any:
        """The samples of this rank's group, of all micro-batches."""
        if self._place.width == 1:
            return batch
        parts, start = [], 0
        for size in sizes:
            rows = self._rows(size, self._place.group)
            parts.append(slice(start + rows.start, start + rows.stop))
            start += size
        return tree_map(
            lambda each: torch.cat([each[part] for part in parts]) if isinstance(each, Tensor) else each, batch
        )

    def _whole(self, outputs: Any, sizes: Sequence[int]) -> Any:
        """The outputs for the whole batch, of those for the samples of this rank's group. Called by all groups."""
        rows = [[len(self._rows(size, group)) for size in sizes] for group in range(self._place.width)]
        leaves, spec = tree_flatten_hf(outputs)
        return tree_unflatten([self._whole_leaf(leaf, rows) for leaf in leaves], spec)

    def _whole_leaf(self, leaf: Any, rows: Sequence[Sequence[int]]) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        own = sum(rows[self._place.group])
        if leaf.dim() == 0 or len(leaf) != own:
            raise ValueError(
                f"the model has an output of shape {list(leaf.shape)}, whose first dimension is not the {own} samples "
                "of this rank's tensor-parallel group, so that the outputs of all groups cannot be put together; leave "
                "return_outputs out, or choose a plan without widths"
            )
        # Bytes, because not every backend gathers every type. All ranks gather equally many.
        sent = leaf.contiguous().view(own, -1).view(torch.uint8)
        most = max(map(sum, rows))
        sent = torch.cat([sent, sent.new_zeros(most - own, sent.shape[1])])
        gathered = [torch.empty_like(sent) for _ in rows]
        dist.all_gather(gathered, sent, group=self._group)
        parts = [each[: sum(part)].split(list(part)) for each, part in zip(gathered, rows, strict=True)]
        whole = torch.cat([part for of_micro_batch in zip(*parts, strict=True) for part in of_micro_batch])
        return whole.view(leaf.dtype).view(-1, *leaf.shape[1:])
