"""Measure what a pipeline's schedule takes beyond the layers of its stages.

A process runs Colossal-AI's 1F1B schedule alone, as a middle stage of one block that sends its messages to itself. The
time of the loop, less that inside the block's passes, is the schedule's: its Python code, gaps between kernels, copies
and kernel work of messages. Time on the wire (``hop_seconds``), waiting for stages and for Gloo's threads is not in it.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..colossalai_support.accelerator import recorded_event
from .layer_passes import Duration, LayerPasses, clock

# isort: split
from colossalai.pipeline import p2p
from colossalai.pipeline.schedule import OneForwardOneBackwardSchedule

MICRO_BATCHES = 4
CUTS = 2

HIDDEN = "hidden_states"


# Messages of this process to itself, which arrive in the order in which they were sent: ``send`` sends a copy and
# returns at once, ``receive`` waits for the next message.


class _SocketLoopback:
    """Messages over a TCP connection to this process itself, as Gloo sends them, by one thread. Two of Gloo's groups in
    one process would take several times as long, because their threads wait for each other's page faults."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            self._out = socket.create_connection(server.getsockname())
            self._in, _ = server.accept()
        for end in (self._out, self._in):
            end.setblocking(False)
        self._unsent: deque[memoryview] = deque()

    def send(self, message: Tensor) -> None:
        self._unsent.append(_bytes_of(message.detach().clone()))
        self._push()

    def receive(self, buffer: Tensor) -> None:
        missing = _bytes_of(buffer.detach())
        while missing:
            with suppress(BlockingIOError):
                missing = missing[self._in.recv_into(missing) :]
            self._push()

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def _push(self) -> None:
        with suppress(BlockingIOError):
            while self._unsent:
                message = self._unsent[0]
                sent = self._out.send(message)
                if sent == len(message):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = message[sent:]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


class _DeviceLoopback:
    def __init__(self) -> None:
        self._sent: deque[Tensor] = deque()

    def send(self, message: Tensor) -> None:
        self._sent.append(message.detach().clone())

    def receive(self, buffer: Tensor) -> None:
        buffer.detach().copy_(self._sent.popleft())


Loopback = _SocketLoopback | _DeviceLoopback


@contextmanager
def loopback(device: torch.device) -> Iterator[Loopback]:
    if device.type != "cpu":
        yield _DeviceLoopback()
        return
    messages = _SocketLoopback()
    try:
        yield messages
    finally:
        messages.close()


class _Operation(NamedTuple):
    """Request of the schedule, as ``torch.distributed.P2POp``, which accepts only registered groups."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any = None


def _middle_stage() -> Any:
    """Place of this stage, as a schedule asks for it; messages do not use the group."""
    no, group = (lambda: False), (lambda: object())
    neighbors = dict(get_prev_rank=lambda: 0, get_next_rank=lambda: 2, get_p2p_process_group=group)
    return SimpleNamespace(num_stages=3, stage=1, is_first_stage=no, is_last_stage=no, **neighbors)


class _BlockStage(nn.Module):
    """The first block of a model as a pipeline stage, and its optimizer; both note the time inside their passes."""

    def __init__(self, passes: LayerPasses) -> None:
        super().__init__()
        self._passes = passes
        self._on_cpu = passes.input_of(0).device.type == "cpu"
        self._times: list[tuple[Any, Any]] = []

    def forward(self, _: Tensor, **received: Tensor) -> dict[str, Tensor]:
        with self._timed():
            hidden = received[HIDDEN]
            # A message that comes back has the size of one that was sent.
            return {HIDDEN: self._passes.forward(hidden, 0, 1) if self._passes.keeps_shape else hidden * 1}

    def backward_by_grad(self, output: Tensor, gradient: Tensor) -> None:
        with self._timed():
            torch.autograd.backward(output, gradient)

    def inside(self) -> Duration:
        """Time inside passes since the last call. The device has finished its work."""
        times, self._times = self._times, []
        if self._on_cpu:
            return sum((stop - start for start, stop in times), Duration(0.0, 0.0))
        return Duration(sum(start.elapsed_time(stop) for start, stop in times) * 1e-3, 0.0)

    @contextmanager
    def _timed(self) -> Iterator[None]:
        start = self._now()
        yield
        self._times.append((start, self._now()))

    def _now(self) -> Any:
        """Now; on a device that computes asynchronously, an event in its order, so that the host does not wait."""
        return clock() if self._on_cpu else recorded_event()


class ScheduleLoop:
    def __init__(self, passes: LayerPasses, messages: Loopback) -> None:
        self._messages = messages
        self._hidden = passes.input_of(0).detach().contiguous()
        self._stage = _BlockStage(passes)
        self._schedule = OneForwardOneBackwardSchedule(_middle_stage(), num_microbatches=MICRO_BATCHES)
        # Ranks exchange the shapes of messages in their first iteration only, so they are known here.
        schedule = self._schedule
        schedule.send_tensor_metadata = schedule.send_grad_metadata = False
        received = {HIDDEN: self._hidden.clone().requires_grad_()}
        schedule.tensor_metadata_recv = p2p.create_send_metadata(received)
        schedule.grad_metadata_recv = p2p.create_send_metadata({HIDDEN: self._hidden})

    def run(self) -> Duration:
        """Time of the schedule itself per micro-batch and cut; gradients are added to those of the parameters."""
        batch = torch.zeros(MICRO_BATCHES)
        # The stage receives its first activation before it has sent anything.
        self._messages.send(self._hidden)
        with _messages_of_schedules(self._messages, self._hidden.device):
            begin = clock()
            self._schedule.forward_backward_step(self._stage, iter([batch]), None, self._stage)
            whole = clock() - begin
        self._messages.receive(torch.empty_like(self._hidden))
        own = whole - self._stage.inside()
        parts = MICRO_BATCHES * CUTS
        return Duration(max(own.wall, 0.0) / parts, max(own.cpu, 0.0) / parts)


@contextmanager
def _messages_of_schedules(messages: Loopback, device: torch.device) -> Iterator[None]:
    """In the block, what Colossal-AI's schedules send goes to ``messages``."""

    def batch_isend_irecv(operations: Sequence[_Operation]) -> list[Any]:
        for operation in operations:
            if operation.op is dist.isend:
                messages.send(operation.tensor)
        return [_Request(messages, each.tensor) for each in operations if each.op is dist.irecv]

    before = p2p.dist, p2p._check_device
    p2p.dist = SimpleNamespace(
        isend=dist.isend, irecv=dist.irecv, P2POp=_Operation, batch_isend_irecv=batch_isend_irecv
    )
    p2p._check_device = lambda group: (device, device.type != "cpu")
    try:
        yield
    finally:
        p2p.dist, p2p._check_device = before


class _Request(NamedTuple):
    messages: Loopback
    buffer: Tensor

    def wait(self) -> None:
        self.messages.receive(self.buffer)
