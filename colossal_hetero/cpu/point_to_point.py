"""Pipeline messages over Gloo, with the semantics that Colossal-AI's schedules expect of NCCL.

Under NCCL a wait on a request makes the *stream* wait and returns to Python at once. The schedules rely on it:

====================  ==========================================  =============================================
the schedules          under Gloo as it is                         here
====================  ==========================================  =============================================
wait on a send         blocks until the peer receives: deadlock    returns at once
wait twice             blocks for ever the second time             the second wait returns at once
drop a send's request  may never be delivered                      kept until the schedule's step ends
reuse a sent tensor    changes the message                         a copy is sent
====================  ==========================================  =============================================

The step's end is the one safe place to wait for the sends: all of this rank's messages of the step are posted and all
that it needs have come, so no peer waits for anything that this rank still has to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from colossalai.pipeline import p2p
from colossalai.pipeline.schedule import (
    InterleavedSchedule,
    OneForwardOneBackwardSchedule,
    ZeroBubbleVPipeScheduler,
)

from .module_proxy import ModuleProxy

__all__ = ["Messages", "patch"]


class _Sent:
    """A message on its way. Nobody has to wait for it: its content is a copy."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Received:
    """A message to come, which may be waited for more than once."""

    def __init__(self, work: dist.Work | None) -> None:
        self._work = work

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
        return True

    def is_completed(self) -> bool:
        return self._work is None


class Messages:
    """The messages of this rank: a ``batch_isend_irecv`` that buffers what it sends."""

    def __init__(self) -> None:
        self._sends: list[tuple[dist.Work | None, torch.Tensor]] = []

    def batch_isend_irecv(self, operations: Iterable[dist.P2POp]) -> list[_Sent | _Received]:
        """Start all ``operations``, in their order, and return a request for each.

        Gloo matches the messages between two ranks in the order in which each of them posts them.
        """
        requests: list[_Sent | _Received] = []
        for operation in operations:
            if operation.op is dist.isend:
                message = operation.tensor.detach().clone()
                work = dist.isend(message, operation.peer, operation.group, operation.tag)
                self._sends.append((work, message))
                requests.append(_Sent())
            else:
                work = dist.irecv(operation.tensor.detach(), operation.peer, operation.group, operation.tag)
                requests.append(_Received(work))
        return requests

    @property
    def kept(self) -> int:
        """How many sent messages are kept, because they may not have left yet."""
        return len(self._sends)

    def wait_for_sends(self) -> None:
        """Wait until every message sent so far has left, and release the copies."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()


def _then_wait_for_sends(step: Callable[..., Any], messages: Messages) -> Callable[..., Any]:
    """``step``, followed by a wait for the messages that it sent."""

    @wraps(step)
    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        outputs = step(*args, **kwargs)
        messages.wait_for_sends()
        return outputs

    return forward_backward_step


def patch() -> None:
    """Give Colossal-AI's pipeline messages that work over Gloo."""
    messages = Messages()
    p2p.dist = ModuleProxy(dist, batch_isend_irecv=messages.batch_isend_irecv)
    for schedule in (OneForwardOneBackwardSchedule, InterleavedSchedule, ZeroBubbleVPipeScheduler):
        schedule.forward_backward_step = _then_wait_for_sends(schedule.forward_backward_step, messages)
    # The original asks for `Backend.HCCL`, which torch lacks, as soon as a group is not NCCL's.
    p2p._check_for_nccl_hccl_backend = p2p.check_for_nccl_backend
