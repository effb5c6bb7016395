"""Replace damaged files of a checkpoint by whole ones from another place, or from another node."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch.distributed as dist

from .format.records import FileCheck
from .reading.found import Copy, content_of
from .reading.reader import CheckpointReader
from .storage.errors import DamagedCopy

__all__ = ["repair"]


class _Damaged(NamedTuple):
    """A damaged file that a rank asks the others for."""

    rank: int
    node: str
    path: str
    name: str
    check: FileCheck


def repair(reader: CheckpointReader, step: int, nodes: Sequence[str]) -> None:
    """Replace the files that this rank has found damaged. Every rank calls it.

    A whole copy comes from another folder that this rank reaches, else from a rank of another node. Files for which
    there is no whole copy stay as they are. ``reader.problems`` tells what was done.

    Args:
        reader: has loaded from the checkpoint.
        step: of the checkpoint.
        nodes: of each rank.
    """
    rank = dist.get_rank()
    left: dict[str, tuple[Copy, str]] = {}
    for bad, name in reader.damaged(step):
        good = reader.whole(step, name, bad.check(name))
        if good is None or not reader.replace(bad, name, content_of(good, name), good.place.name):
            left[f"{bad.place.name}/{bad.path(name)}"] = bad, name
    requests: list[Any] = [None] * len(nodes)
    own = [_Damaged(rank, nodes[rank], path, name, bad.check(name)) for path, (bad, name) in left.items()]
    dist.all_gather_object(requests, own)
    first = {(each.node, each.path): each for of_rank in reversed(requests) for each in of_rank}
    for request in sorted(first.values(), key=lambda each: (each.rank, each.path)):
        good = reader.whole(step, request.name, request.check)
        offers: list[Any] = [None] * len(nodes)
        dist.all_gather_object(offers, good is not None)
        if not any(offers):
            continue
        sender = offers.index(True)
        if rank == sender:
            assert good is not None
            _send(good, request)
        elif rank == request.rank:
            bad, name = left[request.path]
            pieces = _receive(sender)
            reader.replace(bad, name, pieces, f"node {nodes[sender]}")
            with suppress(DamagedCopy):
                deque(pieces, maxlen=0)  # if the file could not be written, the rest is on its way all the same


def _send(good: Copy, request: _Damaged) -> None:
    """Send a file piece by piece; then None, or why it is not whole."""
    end: str | None = None
    try:
        for piece in content_of(good, request.name):
            dist.send_object_list([bytes(piece)], request.rank)
    except DamagedCopy as error:
        end = str(error)
    dist.send_object_list([end], request.rank)


def _receive(sender: int) -> Iterator[memoryview]:
    """The pieces of a file.

    Raises:
        DamagedCopy: it is not whole.
    """
    while True:
        received: list[Any] = [None]
        dist.recv_object_list(received, sender)
        if not isinstance(received[0], bytes):
            break
        yield memoryview(received[0])
    if received[0] is not None:
        raise DamagedCopy(received[0])
