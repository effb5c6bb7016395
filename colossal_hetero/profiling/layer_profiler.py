"""Measure a model's layers on the devices that will train it (AutoHet, section III-D): runs of 1, 2, 4, 8 … consecutive
blocks, to which the time of a block is fitted, and the parts before and after. All ranks measure at once without
communication, with micro-batches, threads and added gradients as in training.

[Note: typical times] Under a CPU quota a process runs until its share of a period (usually 100 ms) is used up, so the
median of short passes would be the full speed. With one thread, passes are measured in CPU time, times one ratio of
wall to CPU time over the whole measurement. With several threads it is the mean wall time, divided into forward and
backward in proportion to CPU time; on other devices the median wall time.
"""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..colossalai_support.accelerator import is_out_of_memory
from ..common.ranks import on_every_rank
from ..layers.chain import Chain, links_of
from ..planner.cluster.gpu_catalog import kind_name
from .device_profiler import device_name
from .layer_memory import measure_memory
from .layer_passes import Duration, LayerPasses, clock, resized
from .memory import counts_bytes, memory_limit, outside_bytes, recover
from .merge_ranks import MeasuredLayers, RankLayers, merge_ranks
from .model_layers import BlockRow, LayerDescription, describe_layers, find_block_row
from .preserved_state import preserved_state
from .progress import Progress

MIN_SECONDS = 3.0
"""Shortest measurement of each micro-batch size: 30 periods of a quota, so one more or less is an error of 3 %."""

MIN_ROUNDS = 5
WARM_UP_ROUNDS = 2
UPDATES = 5

SPREAD_OF_QUARTILES = 1.349  # distance of the quartiles of a normal distribution, in standard deviations
MEDIAN_AGAINST_MEAN = math.sqrt(math.pi / 2)
"""Standard error of the median of many normal values, in standard errors of their mean."""
MAX_ERROR = 0.99

PRECISIONS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

OptimizerFactory = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerFactory] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-6),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-6),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-6),
}


def profile_layers(
    model: nn.Module,
    batch: Any,
    criterion: Callable | None = None,
    *,
    micro_batches: Sequence[int] = (1, 2, 4, 8),
    optimizer: str | OptimizerFactory = "adam",
    precision: str = "fp32",
    max_run: int = 8,
    min_seconds: float = MIN_SECONDS,
    blocks: str | None = None,
    tensor_parallel: int = 1,
    group: dist.ProcessGroup | None = None,
    name: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> MeasuredLayers:
    """Measure the layers of ``model`` on every rank's device. All ranks call it; it also works without ranks.
    Parameters, gradients, buffers, modes and random state are restored. Meanwhile passes add gradients, and a copy of
    the optimizer takes as much memory as the state of ``max_run`` blocks."""
    _check(model, micro_batches, optimizer, precision, tensor_parallel, group)
    factory = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    name, links = name or type(model).__name__, links_of(model) if blocks is None else None
    if links is not None:
        model = Chain(links)
    find_block_row(model, blocks)

    ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else None

    def run() -> tuple[RankLayers, tuple[int, ...], tuple[int, ...]]:
        measured, samples = model, batch
        if precision != "fp32":
            measured = copy.deepcopy(model).to(PRECISIONS[precision])
            samples = tree_map(lambda part: _cast(part, PRECISIONS[precision]), batch)
        layers = describe_layers(measured, resized(samples, 1), blocks=blocks)
        measure = _Measurement(measured, layers, criterion, samples, factory, max_run, min_seconds, group, on_progress)
        with preserved_state(measured):
            measured.train()
            own = dist.get_rank() if dist.is_initialized() else 0
            return measure(sorted(set(micro_batches)), precision), ranks or (own,), layers.parameter_bytes

    everyone = on_every_rank(run, "measuring layers") if dist.is_initialized() else [run()]
    groups = list(dict.fromkeys(ranks for _, ranks, _ in everyone))
    return merge_ranks([each for each, _, _ in everyone], groups, everyone[0][2], tensor_parallel, precision, name)


Part = tuple[str, int, int]
"""A part of the model that is timed: ("run", first block, number of blocks), or one of the constants below."""

ENDS: Part = ("ends", 0, 0)
BEFORE: Part = ("before", 0, 0)
AFTER: Part = ("after", 0, 0)


@dataclass
class _Measurement:
    model: nn.Module
    layers: LayerDescription
    criterion: Callable | None
    batch: Any
    factory: OptimizerFactory
    max_run: int
    least_seconds: float
    group: dist.ProcessGroup | None
    on_progress: Callable[[Progress], None] | None

    def __post_init__(self) -> None:
        self._device = next(self.model.parameters()).device
        count = len(self.layers.row.blocks)
        self._kinds = [*range(count)] if isinstance(self.model, Chain) else _kinds_of_blocks(self.layers.row)
        lengths = [2**power for power in range(count.bit_length()) if 2**power <= min(count, max(self.max_run, 1))]
        self._runs: list[Part] = [("run", 0, length) for length in lengths]
        self._singles: dict[int, Part] = {kind: ("run", self._kinds.index(kind), 1) for kind in set(self._kinds)}
        self._parts = list(dict.fromkeys([*self._runs, *self._singles.values()]))
        self._loop = Duration(0.0, 0.0)

    def __call__(self, sizes: Sequence[int], precision: str) -> RankLayers:
        memory_bytes = memory_limit(self._device).bytes
        # The same name as in the cluster file that `probe` writes.
        result = RankLayers(kind_name(device_name(self._device), memory_bytes), memory_bytes)
        times: dict[int, dict[Part, list[tuple[Duration, Duration]]]] = {}
        counting = self._device if counts_bytes(self._device) else None
        for index, size in enumerate(sizes):
            try:
                times[size] = self._time(sizes, index)
                passes = LayerPasses(self.model, self.layers.row, self.criterion, resized(self.batch, size))
                singles = {kind: block for kind, (_, block, _) in self._singles.items()}
                memory = measure_memory(passes, self.model, self._kinds, singles, counting)
                result.activations, result.outputs = (
                    [math.ceil(each / size) for each in values] for values in (memory.kept, memory.outputs)
                )
                if memory.temporaries:
                    result.temporaries[size] = memory.temporaries
            except Exception as error:
                if not is_out_of_memory(error) or not times:
                    raise
                times.pop(size, None)
                recover(error)
                break
        result.context_bytes = outside_bytes(self._device)
        update, state_factor = self._update(precision)
        # The ratio over the whole measurement, because it then covers as many periods of a quota as possible.
        pace = self._loop.wall / self._loop.cpu if self._by_cpu_time else 1.0
        result.update = [seconds * pace for seconds in update]
        result.state_factor = state_factor
        for size, parts in times.items():
            seconds = {part: self._typical(durations, pace) for part, durations in parts.items()}
            result.errors[size] = self._relative_error(parts)
            result.forward[size], result.backward[size] = (
                [seconds[BEFORE][way], *self._single_blocks(seconds, way), seconds[AFTER][way]] for way in (0, 1)
            )
        return result

    @property
    def _by_cpu_time(self) -> bool:
        return self._device.type == "cpu" and torch.get_num_threads() == 1 and self.group is None

    def _time(self, sizes: Sequence[int], index: int) -> dict[Part, list[tuple[Duration, Duration]]]:
        """Durations of each part, forward and backward, one per round of all parts."""
        size = sizes[index]
        passes = LayerPasses(self.model, self.layers.row, self.criterion, resized(self.batch, size))
        durations: dict[Part, list[tuple[Duration, Duration]]] = {}

        # In a fixed order, a quota might always hit the same part. Layers may communicate, so ranks have the same one.
        order = random.Random(size)

        def round_of_all() -> None:
            if self.on_progress is not None:
                which = f" ({index + 1} of {len(sizes)})" if len(sizes) > 1 else ""
                self.on_progress(Progress(f"measuring micro-batches{which}", size))
            for part in order.sample([ENDS, *self._parts], len(self._parts) + 1):
                if part == ENDS:
                    before, after = passes.ends()
                    durations.setdefault(BEFORE, []).append(before)
                    durations.setdefault(AFTER, []).append(after)
                else:
                    durations.setdefault(part, []).append(passes.run(*part[1:]))

        for _ in range(WARM_UP_ROUNDS):
            round_of_all()
        durations.clear()
        begin = clock()
        rounds = 0
        while self._goes_on(rounds, (clock() - begin).wall):
            round_of_all()
            rounds += 1
        self._loop += clock() - begin
        return durations

    def _goes_on(self, rounds: int, seconds: float) -> bool:
        more = rounds < (MIN_ROUNDS if self.least_seconds > 0 else 1) or seconds < self.least_seconds
        if self.group is None:
            return more
        # If layers communicate, all ranks of the group must run the same number of rounds.
        flag = torch.tensor([float(more)], device=self._device)
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.group)
        return bool(flag.item())

    def _typical(self, durations: Sequence[tuple[Duration, Duration]], pace: float) -> tuple[float, float]:
        """Typical seconds of forward and backward; see [Note: typical times]."""
        ways = list(zip(*durations, strict=True))
        if self._by_cpu_time:
            forward, backward = (pace * statistics.median(each.cpu for each in way) for way in ways)
            return forward, backward
        if self._device.type == "cpu":
            wall = sum(each.wall for way in ways for each in way) / len(durations)
            cpu = [sum(each.cpu for each in way) for way in ways]
            share = cpu[0] / sum(cpu) if sum(cpu) > 0 else 0.5
            return wall * share, wall * (1 - share)
        forward, backward = (statistics.median(each.wall for each in way) for way in ways)
        return forward, backward

    def _relative_error(self, parts: Mapping[Part, Sequence[tuple[Duration, Duration]]]) -> float:
        rounds = zip(*parts.values(), strict=True)
        cpu = self._by_cpu_time
        totals = [sum(each.cpu if cpu else each.wall for part in of_round for each in part) for of_round in rounds]
        return relative_error(totals, of_median=cpu or self._device.type != "cpu")

    def _single_blocks(self, seconds: dict[Part, tuple[float, float]], way: int) -> list[float]:
        """Seconds of each block, such that the sum of the predicted times of all runs equals the measured one. Kinds of
        blocks are in the ratio of the single ones; the longest runs, the most accurate, have most weight."""
        alone = [seconds[self._singles[kind]][way] for kind in self._kinds]
        measured = sum(seconds[part][way] for part in self._runs)
        added = sum(sum(alone[:count]) for _, _, count in self._runs)
        factor = measured / added if added > 0 else 1.0
        return [factor * each for each in alone]

    def _update(self, precision: str) -> tuple[list[float], float]:
        """Seconds of the optimizer's step by layer (CPU time with one thread), and bytes of state per parameter byte.
        Copies are updated, of the longest run's parameters and those before and after the blocks."""
        named = dict(self.model.named_parameters(remove_duplicate=False))
        count = self._runs[-1][2]
        groups = [
            [named[name] for name in self.layers.before],
            [parameter for block in self.layers.row.blocks[:count] for parameter in block.parameters()],
            [named[name] for name in self.layers.after],
        ]
        seconds, held, of = [], 0, 0
        for group in groups:
            took, state, size = self._update_of([each for each in group if each.requires_grad], precision)
            seconds.append(took)
            held, of = held + state, of + size
        sizes = [self.layers.parameter_bytes[index] for index in range(1, len(self.layers.parameter_bytes) - 1)]
        per_byte = seconds[1] / max(sum(sizes[:count]), 1)
        blocks = [per_byte * size for size in sizes]
        return [seconds[0], *blocks, seconds[2]], held / of if of else 1.0

    def _update_of(self, parameters: Sequence[Tensor], precision: str) -> tuple[float, int, int]:
        """Seconds of a step, bytes of parameters, gradients and state, and bytes of parameters."""
        if not parameters:
            return 0.0, 0, 0
        size = sum(each.numel() * each.element_size() for each in parameters)
        # In half precision the optimizer updates copies in single precision.
        copies = [nn.Parameter(each.detach().float().clone()) for each in parameters]
        for each in copies:
            each.grad = torch.full_like(each, 1e-3)
        optimizer = self.factory(copies)
        durations = []
        for step in range(WARM_UP_ROUNDS + (UPDATES if self.least_seconds > 0 else 1)):
            begin = clock()
            optimizer.step()
            if step >= WARM_UP_ROUNDS:
                durations.append(clock() - begin)
        state = sum(
            value.numel() * value.element_size()
            for entry in optimizer.state.values()
            for value in entry.values()
            if isinstance(value, Tensor) and value.dim() > 0
        )
        masters = 0
        if precision != "fp32":
            # For the step, Colossal-AI's optimizer converts each gradient to single precision and drops the other.
            single = sum(each.numel() * each.element_size() for each in copies)
            masters = single + (single - size)
        took = statistics.median(each.cpu if self._by_cpu_time else each.wall for each in durations)
        return took, 2 * size + masters + state, size


def relative_error(values: Sequence[float], *, of_median: bool) -> float:
    """Standard error of the median or mean of independent values, as a share of it; 0 for fewer than three values. That
    of a median is computed from the quartiles, so that a few disturbed values do not change it."""
    if len(values) < 3:
        return 0.0
    if not of_median:
        error = statistics.stdev(values) / statistics.fmean(values)
    else:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
        error = MEDIAN_AGAINST_MEAN * (high - low) / SPREAD_OF_QUARTILES / middle
    return min(error / math.sqrt(len(values)), MAX_ERROR)


def _kinds_of_blocks(row: BlockRow) -> list[int]:
    """The kind of each block as a number; blocks of a kind have the same class and parameter names, shapes, dtypes."""
    seen: dict[Any, int] = {}
    return [
        seen.setdefault(
            (type(block), tuple((name, each.shape, each.dtype) for name, each in block.named_parameters())), len(seen)
        )
        for block in row.blocks
    ]


def _cast(part: Any, dtype: torch.dtype) -> Any:
    return part.to(dtype) if isinstance(part, Tensor) and part.is_floating_point() else part


def _check(
    model: nn.Module,
    micro_batches: Sequence[int],
    optimizer: str | OptimizerFactory,
    precision: str,
    tensor_parallel: int,
    group: dist.ProcessGroup | None,
) -> None:
    if not micro_batches or any(size < 1 for size in micro_batches):
        raise ValueError(f"micro_batches={tuple(micro_batches)}; give sizes of at least 1 sample, e.g. (1, 2, 4, 8)")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {optimizer!r}; valid are {', '.join(OPTIMIZERS)}, or a function")
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; valid are {', '.join(PRECISIONS)}")
    if tensor_parallel < 1 or (tensor_parallel > 1) != (group is not None):
        raise ValueError(
            f"tensor_parallel={tensor_parallel} {'with' if group else 'without'} a group; above 1, pass the ranks that "
            "share the model's layers as group, otherwise pass no group"
        )
    if group is not None and group.size() != tensor_parallel:
        raise ValueError(f"tensor_parallel={tensor_parallel}, but the group has {group.size()} ranks")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model is on the meta device, which cannot compute; build it on the device to measure")
