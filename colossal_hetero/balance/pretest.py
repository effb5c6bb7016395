"""Costs of balancing on this device and network, measured before training (SEMI, Algorithm 2, line 1). Dense, resized
and smaller products are timed for Ω and Φ2, messages of several sizes for Φ1, in one or two seconds. All ranks of the
group get the same costs."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import ArrayLike
from rich.console import Console
from torch import Tensor

from ..colossalai_support.accelerator import is_out_of_memory
from ..layers.workload import impute
from .config import BalanceConfig
from .plan import Costs, Traffic, Volume, fit_affine

log = logging.getLogger(__name__)

RESIZED_SHARES = (0.25, 0.5, 0.75, 0.9)
RECEIVED_SHARES = (0.125, 0.25, 0.5)
"""Shares of a product that are timed as a receiver computes them, in a separate smaller product."""
MIGRATED_SHARES = (0.125, 0.25, 0.5, 0.75)
MESSAGES = {4 * 2**10: 21, 64 * 2**10: 21, 2**20: 7, 4 * 2**20: 7, 16 * 2**20: 3}
"""Sizes in bytes of the timed messages, and how often each is timed; on a slow network only the smaller ones are."""
PRODUCT_SECONDS = 1.2  # time after which no further round of products begins
DENSE_SECONDS = 0.04  # maximum time of a dense product; instead of a slower one a smaller product is timed
MIN_SIZE = 512  # minimum to which a dimension is reduced: in larger products the cost of resizing is relatively smaller
MAX_ROUNDS = 11
MESSAGE_SECONDS = 0.1  # time of a message after which no larger ones are timed

Form = Literal["column", "block"]


Shape = tuple[int, int]
"""N and L of a rank's product ``Y [M, N] = X [M, L] · W [N, L]ᵀ``."""


@dataclass(frozen=True)
class CostMeasurement:
    """What costs are measured for: the layers of the ranks of ``group``, and what they send."""

    group: dist.ProcessGroup
    shapes: Sequence[Shape]
    rows: int
    dtype: torch.dtype
    device: torch.device
    traffic: Callable[[float], Traffic]  # what is sent in an iteration if a rank gives this share of its work away
    form: Form


def prepare_costs(config: BalanceConfig, measurement: CostMeasurement) -> Costs:
    """Costs according to the configuration: zero, or measured now (:func:`measure_costs`). Collective over the group,
    whose ranks all get the same costs."""
    group = measurement.group
    if group.size() == 1 or not config.measure_costs:
        return Costs()
    if not _fit_everywhere(measurement):
        if group.rank() == 0:
            log.warning(
                "a rank has too little memory left to measure the costs of balancing, so they are taken as zero; use "
                "smaller batches"
            )
        return Costs()
    shown = Console(stderr=True).status("Measuring the costs of balancing")
    with shown if dist.get_rank() == 0 else nullcontext():
        return measure_costs(measurement)


def measure_costs(measurement: CostMeasurement) -> Costs:
    """Measure Ω1, Ω2, Φ1 and Φ2 on this device and network; all ranks get the same. Collective over the group."""
    group, device = measurement.group, measurement.device
    resized, received = _time_products(measurement)
    everyone = np.median(_gather([*resized, *received], group, device), axis=0)
    resize_fixed, resize_per_share, receive_factor = fit_products(everyone[: len(resized)], everyone[len(resized) :])
    links = {kind: fit_link(*_time_messages(send, group, device)) for kind, send in _message_kinds(group).items()}
    traffic = [measurement.traffic(share) for share in MIGRATED_SHARES]
    communication = [sum(seconds_of(getattr(sent, kind), *link) for kind, link in links.items()) for sent in traffic]
    fixed_seconds, seconds_per_share = fit_affine(MIGRATED_SHARES, communication)
    costs = Costs(resize_fixed, resize_per_share, fixed_seconds, seconds_per_share, receive_factor)
    # Processors that round differently may get fits that differ in the last bit.
    message = torch.tensor(list(asdict(costs).values()), dtype=torch.float64, device=device)
    dist.broadcast(message, src=dist.get_global_rank(group, 0), group=group)
    return Costs(*message.tolist())


def fit_products(resized: ArrayLike, received: ArrayLike) -> tuple[float, float, float]:
    """``(Ω1, Ω2, Φ2)`` from times of products, in units of the dense one; Φ2 is the slope of a line through 0."""
    pruned, taken = np.array(RESIZED_SHARES), np.array(RECEIVED_SHARES)
    return *fit_affine(pruned, np.asarray(resized) - (1.0 - pruned)), float(taken @ received) / float(taken @ taken)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in seconds, by the smallest message, and seconds per byte, by the larger ones."""
    extra_bytes, extra = np.asarray(sizes[1:]) - sizes[0], np.asarray(seconds[1:]) - seconds[0]
    slope = float(extra_bytes @ extra) / float(extra_bytes @ extra_bytes) if len(extra) else seconds[0] / sizes[0]
    slope = max(slope, 0.0)
    return max(seconds[0] - slope * sizes[0], 0.0), slope


def seconds_of(volume: Volume, latency: float, seconds_per_byte: float) -> float:
    return volume.messages * latency + volume.bytes * seconds_per_byte


def _fit_everywhere(measurement: CostMeasurement) -> bool:
    """True if every rank has memory for the measurement: a rank that failed in it would let the others wait."""
    largest = max((outputs * columns for outputs, columns in measurement.shapes), default=0)
    widest = max(map(sum, measurement.shapes), default=0)
    fits = 1.0
    try:
        # Operands, results, and a part of each; and the largest message.
        torch.empty(3 * (largest + measurement.rows * widest), dtype=measurement.dtype, device=measurement.device)
        torch.empty(max(MESSAGES), dtype=torch.uint8, device=measurement.device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        fits = 0.0
    return bool(_gather([fits], measurement.group, measurement.device).min())


# Products ---------------------------------------------------------------------------------------------------------


def _time_products(measurement: CostMeasurement) -> tuple[list[float], list[float]]:
    """Times of resized and received products of the largest layer relative to a dense one, from the fastest of several
    rounds, because other work on the machine only adds time."""
    if not measurement.shapes:
        return [1.0 - share for share in RESIZED_SHARES], list(RECEIVED_SHARES)
    dtype, device = measurement.dtype, measurement.device
    # A separate generator, so that measuring does not change the random numbers of training.
    generator = torch.Generator(device).manual_seed(0)
    largest = max(measurement.shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))
    rows, shape = _affordable(largest, measurement.rows, dtype, device, generator)
    products = _Products(shape, rows, dtype, device, generator)
    along = 1 if measurement.form == "column" else 0
    size = shape[along]
    runs = [products.dense]
    runs += [products.part(along, size - round(share * size), whole_gradients=True) for share in RESIZED_SHARES]
    runs += [products.part(along, round(share * size), whole_gradients=False) for share in RECEIVED_SHARES]
    rounds: list[list[float]] = []
    start = time.perf_counter()
    while len(rounds) < 2 or (len(rounds) < MAX_ROUNDS and time.perf_counter() - start < PRODUCT_SECONDS):
        rounds.append([_seconds(run, device) for run in runs])
    dense, *parts = np.min(rounds, axis=0).tolist()
    ratios = [part / dense for part in parts]
    return ratios[: len(RESIZED_SHARES)], ratios[len(RESIZED_SHARES) :]


def _affordable(
    shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> tuple[int, Shape]:
    """Rows and shape, reduced until a dense product takes at most :data:`DENSE_SECONDS`, if possible."""
    sizes = [rows, *shape]
    probe = [min(size, MIN_SIZE // 2) for size in sizes]
    products = _Products((probe[1], probe[2]), probe[0], dtype, device, generator)
    _seconds(products.dense, device)
    seconds = _seconds(products.dense, device) * math.prod(sizes) / math.prod(probe)
    while seconds > DENSE_SECONDS and max(sizes) > MIN_SIZE:
        largest = sizes.index(max(sizes))
        smaller = max(sizes[largest] // 2, MIN_SIZE)
        seconds *= smaller / sizes[largest]
        sizes[largest] = smaller
    return sizes[0], (sizes[1], sizes[2])


class _Products:
    """A linear layer's three products (output, input gradient, weight gradient), whole or in part."""

    def __init__(
        self, shape: Shape, rows: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator
    ) -> None:
        def filled(*size: int) -> Tensor:
            return torch.randn(*size, dtype=dtype, device=device, generator=generator)

        self.x, self.dy = filled(rows, shape[1]), filled(rows, shape[0])
        self.weight = filled(*shape)

    def dense(self) -> None:
        self._multiply(self.x, self.weight, self.dy)

    @staticmethod
    def _multiply(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        F.linear(x, weight)
        return dy @ weight, dy.t() @ x

    def part(self, along: int, count: int, whole_gradients: bool) -> Callable[[], None]:
        """Products of ``count`` of the weight's rows (``along`` 0) or columns (1): as in resizing, selected from the
        weight and with expanded gradients, or, without ``whole_gradients``, of a separate weight, as on a receiver."""
        size = self.weight.shape[along]
        count = min(max(count, 1), size)
        kept = torch.arange(count, device=self.weight.device) * size // count
        own_weight = self.weight.index_select(along, kept)
        dy = self.dy if along else self.dy[:, :count].contiguous()

        def run() -> None:
            weight = self.weight.index_select(along, kept) if whole_gradients else own_weight
            x = self.x.index_select(1, kept) if along else self.x
            dx, dw = self._multiply(x, weight, dy)
            if whole_gradients:
                impute(dw, kept, along, size, "zero")
                if along:
                    impute(dx, kept, 1, size, "zero")

        return run


def _seconds(run: Callable[[], Any], device: torch.device) -> float:
    synchronize = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start


# Messages ---------------------------------------------------------------------------------------------------------


def _message_kinds(group: dist.ProcessGroup) -> dict[str, Callable[[Tensor], None]]:
    """Functions that send a tensor, by the field names of :class:`Traffic`; even ranks send to odd ones."""
    root = dist.get_global_rank(group, 0)
    peer = group.rank() ^ 1

    def point_to_point(tensor: Tensor) -> None:
        if peer >= group.size():
            return
        operation = dist.irecv if group.rank() % 2 else dist.isend
        message = dist.P2POp(operation, tensor, dist.get_global_rank(group, peer), group=group)
        for request in dist.batch_isend_irecv([message]):
            request.wait()

    return {
        "point_to_point": point_to_point,
        "broadcast": lambda tensor: dist.broadcast(tensor, src=root, group=group),
        "reduce": lambda tensor: dist.reduce(tensor, dst=root, group=group),
    }


def _time_messages(
    send: Callable[[Tensor], None], group: dist.ProcessGroup, device: torch.device
) -> tuple[list[int], list[float]]:
    """Message sizes in bytes and, for each, the minimum time on the slowest rank; equal on all ranks."""
    sizes: list[int] = []
    seconds: list[float] = []
    start = torch.zeros(1, device=device)
    for size, repeats in MESSAGES.items():
        tensor = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(repeats):
            dist.all_reduce(start, group=group)
            times.append(_seconds(partial(send, tensor), device))
        sizes.append(size)
        seconds.append(float(_gather([min(times)], group, device).max()))
        if seconds[-1] > MESSAGE_SECONDS:
            break
    return sizes, seconds


# The same on all ranks ---------------------------------------------------------------------------------------------


def _gather(values: Sequence[float], group: dist.ProcessGroup, device: torch.device) -> np.ndarray:
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    return torch.stack(everyone).cpu().numpy()
