"""Pipeline messages over Gloo, with the semantics that Colossal-AI's schedules expect of NCCL.

Under NCCL, waiting for a request makes the *stream* wait and returns to Python at once. The schedules rely on that:

====================  ==========================================  =============================================
the schedules         under plain Gloo                            under this module
====================  ==========================================  =============================================
wait on a send         blocks until the peer receives: deadlock    returns at once
wait twice             blocks for ever the second time             the second wait returns at once
drop a send's request  may never be delivered                      kept until the schedule's step ends
reuse a sent tensor    changes the message                         a copy is sent
====================  ==========================================  =============================================

The end of the step is the only safe place to wait for the sends: this rank has posted all its messages of the step and
received all that it needs, so no other rank is waiting for it.
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

from ..module_proxy import ModuleProxy

__all__ = ["Messages", "forget_messages", "patch"]


class _Sent:
    """The request of a sent message, whose wait returns at once because a copy is sent."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Received:
    """The request of a message to receive, which may be waited for more than once."""

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
    """The messages of this rank: a ``batch_isend_irecv`` that sends copies."""

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
        """The number of copies that are kept because their sending may not be finished."""
        return len(self._sends)

    def wait_for_sends(self) -> None:
        """Wait until every message posted so far is sent, and release the copies."""
        for work, _ in self._sends:
            if work is not None:
                work.wait()
        self._sends.clear()

    def forget(self) -> None:
        """Release the copies of a step that never ended, without a wait: their connections are broken or closed."""
        self._sends.clear()


def _then_wait_for_sends(step: Callable[..., Any], messages: Messages) -> Callable[..., Any]:
    """``step``, followed by a wait for the messages that it sent."""

    @wraps(step)
    def forward_backward_step(*args: Any, **kwargs: Any) -> Any:
        outputs = step(*args, **kwargs)
        messages.wait_for_sends()
        return outputs

    return forward_backward_step


_messages = Messages()
"""Those of the pipelines of this process."""


def forget_messages() -> None:
    """Forget the messages of a pipeline whose step never ended, which refer to their process group."""
    _messages.forget()


def patch() -> None:
    """Let Colossal-AI's pipeline send its messages over Gloo."""
    p2p.dist = ModuleProxy(dist, batch_isend_irecv=_messages.batch_isend_irecv)
    for schedule in (OneForwardOneBackwardSchedule, InterleavedSchedule, ZeroBubbleVPipeScheduler):
        schedule.forward_backward_step = _then_wait_for_sends(schedule.forward_backward_step, _messages)
    # For a group that is not NCCL's, the original uses `Backend.HCCL`, which torch does not have.
    p2p._check_for_nccl_hccl_backend = p2p.check_for_nccl_backend
