"""Messages of a pipeline whose stages have different widths; see [Note: messages between widths].

Each message is sent by Colossal-AI's own function. So the shapes of tensors travel ahead of the first message between
two ranks and are kept, unless the plugin is told ``enable_metadata_cache=False``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.pipeline.p2p import P2PMetadata, PipelineP2PCommunication, create_send_metadata
from colossalai.pipeline.stage_manager import PipelineStageManager
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .sample_ranges import GroupPlace, overlaps, sample_range

__all__ = ["WideMessages"]


class WideMessages(PipelineP2PCommunication):
    """The messages of one rank: it sends each group of a neighboring stage the samples that this group computes.

    Takes the place of the ``comm`` of a 1F1B schedule.

    Args:
        stage_manager: of the schedule.
        place: of this rank.
        group: has all ranks in ``place.columns``.
        keeps_metadata: whether all micro-batches in training have tensors of the same shapes.
    """

    def __init__(
        self, stage_manager: PipelineStageManager, place: GroupPlace, group: dist.ProcessGroup, keeps_metadata: bool
    ) -> None:
        super().__init__(stage_manager, overlap_p2p=False)
        first, last = place.stage == 0, place.stage + 1 == len(place.widths)
        self._before = None if first else _Cut(place, place.columns[place.stage - 1], group, keeps_metadata)
        self._behind = None if last else _Cut(place, place.columns[place.stage + 1], group, keeps_metadata)

    def begin(self, sizes: Sequence[int]) -> None:
        """The passes of a batch begin, with so many samples in each micro-batch of all groups together."""
        for cut in (self._before, self._behind):
            if cut is not None:
                cut.begin(sizes)

    def recv_forward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """See ``PipelineP2PCommunication.recv_forward``, also for the arguments here and below, which are not used."""
        assert self._before is not None
        return self._before.exchange(None, receives=True), []

    def recv_backward(self, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """See ``PipelineP2PCommunication.recv_backward``."""
        assert self._behind is not None
        return self._behind.exchange(None, receives=True), []

    def send_forward(self, output_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """See ``PipelineP2PCommunication.send_forward``."""
        assert self._behind is not None
        self._behind.exchange(output_object, receives=False)
        return []

    def send_backward(self, input_object: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """See ``PipelineP2PCommunication.send_backward``."""
        assert self._before is not None
        self._before.exchange(input_object, receives=False)
        return []

    def send_forward_recv_backward(self, input_object: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """See ``PipelineP2PCommunication.send_forward_recv_backward``."""
        assert self._behind is not None
        return self._behind.exchange(input_object, receives=True), []

    def send_backward_recv_forward(self, input_object: Any, *args: Any, **kwargs: Any) -> tuple[Any, list[Any]]:
        """See ``PipelineP2PCommunication.send_backward_recv_forward``."""
        assert self._before is not None
        return self._before.exchange(input_object, receives=True), []


class _Cut:
    """What a rank sends and receives over the cut between its stage and a neighboring one."""

    def __init__(self, place: GroupPlace, peers: Sequence[int], group: dist.ProcessGroup, keeps_metadata: bool) -> None:
        self._place, self._peers, self._group = place, peers, group
        self._keeps_metadata = keeps_metadata
        self._told: set[int] = set()
        self._known: dict[int, P2PMetadata] = {}
        self._to_send: Iterator[int] = iter(())
        self._to_receive: Iterator[int] = iter(())

    def begin(self, sizes: Sequence[int]) -> None:
        self._to_send, self._to_receive = iter(sizes), iter(sizes)

    def exchange(self, sent: Any, receives: bool) -> Any:
        """Send this rank's samples of the next micro-batch to send, and receive those of the next one to receive.

        Both are done in one go with each peer. Only training does both, where all micro-batches have the same size.

        Args:
            sent: a tree of tensors ``[samples of this group, …]``; None to send nothing.
            receives: whether to receive.

        Returns:
            The tree that was received, with tensors ``[samples of this group, …]``; None without ``receives``.
        """
        sizes = [
            next(each) for each, wanted in ((self._to_send, sent is not None), (self._to_receive, receives)) if wanted
        ]
        assert len(set(sizes)) == 1, f"micro-batches of {sizes} samples at once"
        if sent is not None:
            self._check(sent, sizes[0])
        received, handles = [], []
        for other, rows in overlaps(sizes[0], self._place.width, self._place.group, len(self._peers)):
            piece, started = self._start(self._peers[other], None if sent is None else _piece(sent, rows), receives)
            received.append(piece)
            handles += started
        for handle in handles:
            handle.wait()
        return _joined(received) if receives else None

    def _start(self, peer: int, piece: Any, receives: bool) -> tuple[Any, list[Any]]:
        """Start to send and receive; the piece that is received is complete after a wait for the handles."""
        # In an evaluation shapes differ from those in training.
        keeps = self._keeps_metadata and torch.is_grad_enabled()
        known = self._known.get(peer) if keeps and receives else None
        received, handles = p2p._communicate(
            piece,
            send_dst=None if piece is None else peer,
            recv_src=peer if receives else None,
            overlap_p2p=True,
            send_group=self._group if piece is not None else None,
            recv_group=self._group if receives else None,
            send_metadata=not (keeps and peer in self._told),
            metadata_recv=known,
        )
        if keeps and piece is not None:
            self._told.add(peer)
        if keeps and receives and known is None:
            metadata = create_send_metadata(received, strict=False)
            if not metadata.non_tensor_obj_idx:  # others are sent with every message
                self._known[peer] = metadata
        return received, handles

    def _check(self, sent: Any, size: int) -> None:
        samples = len(sample_range(size, self._place.width, self._place.group))
        for each in tree_flatten(sent)[0]:
            if isinstance(each, Tensor) and (each.dim() == 0 or len(each) != samples):
                raise ValueError(
                    f"stage {self._place.stage} sends a tensor of shape {list(each.shape)} to its neighbor, but the "
                    f"first dimension must be the {samples} samples of its group, because the plan's stages divide "
                    "micro-batches by samples; choose a plan without widths for this model"
                )


def _piece(tree: Any, rows: range) -> Any:
    """The same tree with these rows of its tensors."""
    return tree_map(lambda each: each[rows.start : rows.stop] if isinstance(each, Tensor) else each, tree)


def _joined(pieces: Sequence[Any]) -> Any:
    """One tree of these, whose tensors are put together along their first dimension."""
    if len(pieces) == 1:
        return pieces[0]
    leaves, spec = zip(*map(tree_flatten, pieces), strict=True)
    return tree_unflatten([_joined_leaf(parts) for parts in zip(*leaves, strict=True)], spec[0])


def _joined_leaf(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Tensor):
        return parts[0]
    return torch.cat([part.detach() for part in parts]).requires_grad_(parts[0].requires_grad)
