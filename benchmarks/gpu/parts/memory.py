"""Memory on a GPU: the largest batch, migrated units, and changes of plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

import colossal_hetero.colossalai_support.accelerator  # noqa: F401  (prepares Colossal-AI before it is imported)

# isort: split
from colossalai.accelerator import get_accelerator

from benchmarks.gpu.part import Case, Machine, Part, Row
from benchmarks.gpu.ranks import run_ranks
from benchmarks.gpu.vit_training import Shape, VitTraining, shape_for
from colossal_hetero import BalanceConfig
from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.colossalai_support.accelerator import is_out_of_memory
from colossal_hetero.layers import hetero_layers
from colossal_hetero.plugin.zero.zero_stages import plugin_of_stage, synchronizer
from colossal_hetero.profiling.memory import memory_limit, recover, reserved_memory
from colossal_hetero.profiling.rank_profiler import describe, profile_ranks
from colossal_hetero.profiling.training_step import TrialRun, default_training_step

GIB = 2**30
LIMIT_BYTES = 8 * GIB
ITERATIONS = 4
"""Iterations with each size; two of them belong to an optimizer step."""
SHARES = (0.25, 0.5, 0.75)
"""Migrated shares of a rank's units."""
NEVER = 10**9
"""Warm-up iterations after which the balancer would decide on a plan by itself."""


# The largest batch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BatchSearch:
    """What is trained with batches of every size."""

    stage: int
    precision: str
    shape: Shape
    cap: int
    """Largest batch that is tried, in samples."""
    limit_bytes: int | None
    """Memory of the GPU that the process may use; None: all of it."""


class Repeated(Dataset):
    """A data set of one image, repeated."""

    def __init__(self, shape: Shape) -> None:
        images, labels = shape.samples(torch.device("cpu"))
        self._sample = images[0], labels[0]

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Any:
        return self._sample


class OneRank:
    """A model that one rank trains at a ZeRO stage, as the plugin for that stage configures it."""

    def __init__(self, device: torch.device, search: BatchSearch) -> None:
        if device.type == "cuda" and search.limit_bytes is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(search.limit_bytes / total, device)
        self.device, self.search = device, search
        model = search.shape.build()
        self.description = describe(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        # With a large scale the first steps would overflow, and the optimizer would not make its state.
        options = {"initial_scale": 1} if search.stage in (1, 2) else {}
        plugin = plugin_of_stage(search.stage, search.precision, 0.0, options)
        self.model, self.optimizer, self.criterion, *_ = plugin.configure(model, optimizer, F.cross_entropy)
        self.synchronize = synchronizer(search.stage, self.model, self.optimizer)
        loader = DataLoader(Repeated(search.shape))
        self.trial = TrialRun(self.model, self.optimizer, self.criterion, default_training_step, loader)

    def train(self, batch: int) -> None:
        """Train like a usual loop, whose names keep the outputs and the loss of an iteration during the next one."""
        for iteration in range(ITERATIONS):
            is_last = iteration % 2 == 1
            self.synchronize(is_last)
            images, labels = self.trial.batch(range(batch))
            outputs = self.model(images)
            loss = self.criterion(outputs, labels)
            self.optimizer.backward(loss)
            if is_last:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def trains(self, batch: int) -> bool:
        """Whether the memory suffices for batches of that size."""
        try:
            self.train(batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            recover(error)
            return False
        return True


def profiled(device: torch.device, search: BatchSearch) -> tuple[int, int, float, bool]:
    """The largest size that profiling finds, the bytes that it kept free, its seconds, and whether that size trains."""
    rank = OneRank(device, search)
    begin = time.perf_counter()
    profile = profile_ranks(
        rank.trial,
        rank.description,
        stage=search.stage,
        precision=search.precision,
        cap=search.cap,
        synchronize=rank.synchronize,
        replica_of=[0],
    )
    seconds = time.perf_counter() - begin
    rank.trial.release()
    found, kept_free = profile.kinds[0].max_batch, 0
    if device.type == "cuda":
        kept_free = max(memory_limit(device).bytes - profile.kinds[0].memory_bytes, 0)
    return found, kept_free, seconds, rank.trains(max(found, 1))


def every_size(device: torch.device, search: BatchSearch, kept_free: int) -> int:
    """The largest size that trains when 1, 2, 3, … are tried, with ``kept_free`` bytes kept free."""
    rank = OneRank(device, search)
    rank.train(1)
    largest = 0
    with reserved_memory(kept_free, device):
        while largest < search.cap and rank.trains(largest + 1):
            largest += 1
    return largest


def largest_batch(machine: Machine, search: BatchSearch) -> list[Row]:
    found, kept_free, seconds, does_train = run_ranks(machine, 1, profiled, search)[0]
    # Each begins in a process of its own, because a step that fails leaves traces.
    largest = {kept: run_ranks(machine, 1, every_size, search, kept)[0] for kept in {kept_free, 0}}
    limit = "no limit" if search.limit_bytes is None else f"limit {search.limit_bytes / GIB:.0f} GiB"
    note = f"{limit}, profiled in {seconds:.1f} s, {'trains' if does_train else '**does not train**'}"
    return [(f"{found} samples", f"{largest[kept_free]} samples", f"{largest[0]} samples", note)]


# Migration -----------------------------------------------------------------------------------------------------------


def follow(training: VitTraining, share: float) -> None:
    """Migrate that share of the last rank's work to the others, from the next iteration on."""
    ranks = dist.get_world_size()
    receive = (share / (ranks - 1),) * (ranks - 1)
    training.plugin.balancer.follow(
        BalancePlan(resize=(0.0,) * ranks, migrate=(0.0,) * (ranks - 1) + (share,), receive=(*receive, 0.0))
    )


def migrating(device: torch.device, shape: Shape) -> VitTraining:
    """A training whose plans are given, and never decided."""
    balance = BalanceConfig(mode="migrate", warmup_iterations=NEVER, measure_costs=False)
    training = VitTraining(device, shape, balance)
    for _ in range(3):
        training.iterate()
    return training


def peaks(device: torch.device, shape: Shape) -> tuple[list[int], int]:
    """Peak bytes of an iteration on this rank without migration and for each of :data:`SHARES`, and its weights' bytes.

    The weights are those that can migrate.
    """
    training = migrating(device, shape)
    found = []
    for share in (0.0, *SHARES):
        follow(training, share)
        training.iterate()
        get_accelerator().reset_peak_memory_stats()
        training.iterate()
        found.append(int(get_accelerator().max_memory_allocated()))
    matrices = [layer.matrix for layer in hetero_layers(training.model).values()]
    return found, sum(matrix.numel() * matrix.element_size() for matrix in matrices)


def migrated_memory(machine: Machine, shape: Shape) -> list[Row]:
    (receiver, weight_bytes), (giver, _) = run_ranks(machine, 2, peaks, shape)
    rows: list[Row] = []
    for number, share in enumerate(SHARES, start=1):
        more = [(of_rank[number] - of_rank[0]) / 2**20 for of_rank in (receiver, giver)]
        weights = f"weights {share * weight_bytes / 2**20:.1f} MiB"
        rows.append((f"receiver {more[0]:+.1f} MiB", f"giver {more[1]:+.1f} MiB", weights, f"{share:.0%} migrated"))
    return rows


def growth(device: torch.device, shape: Shape, changes: int) -> tuple[int, int, int, int]:
    """Bytes allocated and reserved after about a tenth of the changes of plan, and after all, with the same plan."""
    training = migrating(device, shape)
    settled = (0, 0)
    plans = (0.0, *SHARES)
    last = changes - 1
    first = last - (last - changes // 10) // len(plans) * len(plans)
    for number in range(changes):
        follow(training, plans[number % len(plans)])
        training.iterate()
        if number == first:
            settled = _in_use()
    return (*settled, *_in_use())


def _in_use() -> tuple[int, int]:
    get_accelerator().synchronize()
    return int(get_accelerator().memory_allocated()), int(get_accelerator().memory_reserved())


def allocator_growth(machine: Machine, shape: Shape, changes: int) -> list[Row]:
    rows: list[Row] = []
    for rank, (allocated, reserved, allocated_at_end, reserved_at_end) in enumerate(
        run_ranks(machine, 2, growth, shape, changes)
    ):
        rows.append(
            (
                f"allocated {(allocated_at_end - allocated) / 2**20:+.1f} MiB",
                f"reserved {(reserved_at_end - reserved) / 2**20:+.1f} MiB",
                f"reserved in all {reserved_at_end / 2**20:.0f} MiB",
                f"rank {rank}, {changes} changes",
            )
        )
    return rows


def filled_card(device: torch.device, shape: Shape, for_good: bool) -> tuple[float, bool, bool]:
    """The share that a rank received of three quarters that were asked for, after the first rank has filled the GPU to
    95 %; whether units were permanently re-sharded; and whether the losses are numbers."""
    balance = BalanceConfig(
        mode="migrate", warmup_iterations=NEVER, measure_costs=False, reshard_after=1 if for_good else None
    )
    training = VitTraining(device, shape, balance)
    for _ in range(3):
        training.iterate()
    ballast = None
    if device.type == "cuda" and dist.get_rank() == 0:
        free, total = torch.cuda.mem_get_info(device)
        ballast = torch.empty(max(0, free - total // 20), dtype=torch.uint8, device=device)
    dist.barrier()
    follow(training, SHARES[-1])
    for _ in range(6):
        training.iterate()
    del ballast
    balancer = training.plugin.balancer
    return balancer.plan.max_received, balancer.has_resharded, bool(torch.tensor(training.losses).isfinite().all())


def filled(machine: Machine, shape: Shape) -> list[Row]:
    rows: list[Row] = []
    for for_good in (False, True):
        received, resharded, trains = run_ranks(machine, 2, filled_card, shape, for_good)[0]
        note = "permanently re-sharded" if resharded else "migrated in each iteration"
        rows.append((f"asked for {SHARES[-1]:.0%}", f"received {received:.0%}", "", f"{note}, loss finite: {trains}"))
    return rows


# The part ------------------------------------------------------------------------------------------------------------


def cases(machine: Machine) -> Sequence[Case]:
    if machine.is_tiny:
        searches = [BatchSearch(1, "bf16", shape_for(machine, _MODEL), cap=2, limit_bytes=None)]
    else:
        searches = [
            BatchSearch(stage, precision, _MODEL, cap=4096, limit_bytes=LIMIT_BYTES)
            for stage in range(4)
            for precision in (("fp16", "bf16") if stage < 3 else ("bf16",))
        ]
    shape = shape_for(machine, Shape(width=1024, depth=4, heads=16, image=64, patch=16, batch=16))
    wide = shape_for(machine, Shape(width=4096, depth=4, heads=32, image=64, patch=16, batch=64))
    changes = 8 if machine.is_tiny else 500
    needed = LIMIT_BYTES + GIB
    return [
        *(
            Case(f"largest batch, stage {each.stage}, {each.precision}", partial(largest_batch, machine, each), needed)
            for each in searches
        ),
        Case("migrated units", partial(migrated_memory, machine, shape), 4 * GIB),
        Case("filled to 95 %", partial(filled, machine, wide), 8 * GIB),
        Case("changes of plan", partial(allocator_growth, machine, shape, changes), 4 * GIB),
    ]


_MODEL = Shape(width=1024, depth=12, heads=16, image=224, patch=16, batch=1)

PART = Part(
    name="memory",
    about=f"""
*Largest batch*: the process may use {LIMIT_BYTES / GIB:.0f} GiB of the GPU (`set_per_process_memory_fraction`). One
process profiles a ViT of 151 million parameters as `HeteroZeroPlugin` does, and then trains with the size that it
found. Two others train with 1, 2, 3, … samples until the memory is used up: one with as much memory kept free as
profiling keeps (3 % of what batches can use, for longer samples and fragmentation), one with all. Aim: the first two
columns are equal. FSDP (stage 3) has no fp16.

*Migrated units*: two ranks share the GPU over Gloo, and rank 1 gives units to rank 0. Columns: how much higher the peak
of an iteration is than without migration, and the size of the migrated weights.

*Filled to 95 %*: after three iterations rank 0 fills the GPU, and three quarters of a rank's units are given to it, in
each iteration and for good. Aim: what does not fit is not received, and both ranks train on.

*Changes of plan*: the migrated share changes in every iteration. Columns: growth of the allocator's memory between a
tenth of the changes and all of them. Aim: none is allocated, and what is reserved stays within 5 %.
""",
    columns=("case", "found / receiver", "every size, 3 % kept free / giver", "every size", "note"),
    cases=cases,
)
