"""Save under one plan and load under another: 36 pairs, compared bit for bit, with the bytes that ranks read.

    python -m benchmarks.checkpoint.resharding [--pairs 0 7 29]

For every pair, a run with the first plan trains two steps and saves. A run with the second plan, in other processes and
often with another number of them, trains one step, so that it has other values, and resumes. Then the tensors of all
its ranks are put together and compared with those of the first run: parameters, moments and counts of steps. "Read" is
what all ranks read from the checkpoint's files over what they need; "busiest" is the most that a rank reads over the
most that a rank needs: a box in a file is read whole, by one rank, which sends others what they need of it. The last
column is the difference of the losses of the next two steps from those of the first run: bits may differ, because other
plans sum in another order.

Aim: every tensor equal, and at most 1.05 of the need read.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import tests.support.checkpoint_runs as runs
from benchmarks.common import print_table, read_options
from colossal_hetero.checkpoint.layer_checkpoint import Start
from tests.support.harness import run_ranks
from tests.support.planning import make_plan, unequal_plan

MAX_READ_SHARE = 1.05
WIDTHS: dict[str, dict[str, Any]] = {
    "gpt2": dict(n_embd=384),
    "llama": dict(hidden_size=384, intermediate_size=480),
    "vit": dict(embed_dim=384, mlp_ratio=2.0),
}
"""Wider than the models of the tests: what each rank reads is more even."""
MICRO_BATCH = 4
"""A replica with one stage has two of them, one with two stages four: together a global batch."""
MAX_LOSS_DIFFERENCE = {"fp32": 1e-5, "bf16": 2e-2}


class Plan(NamedTuple):
    """How many ranks there are, and how they divide the model."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def options(self, precision: str) -> dict[str, Any]:
        found: dict[str, Any] = dict(tp_size=self.tp, pp_size=self.pp, precision=precision)
        return found | (dict(zero_stage=self.zero) if self.zero else {})

    def __str__(self) -> str:
        return f"tp {self.tp}, pp {self.pp}, dp {self.dp}" + (f", ZeRO {self.zero}" if self.zero else "")


class Unequal(NamedTuple):
    """Replicas of different depth: for each, the blocks of its stages. A stage has ``tp`` ranks."""

    replicas: tuple[tuple[int, ...], ...]
    tp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        return self.tp * sum(map(len, self.replicas))

    def options(self, precision: str) -> dict[str, Any]:
        rank = itertools.count()
        plans = [
            make_plan([[[next(rank) for _ in range(self.tp)] for _ in blocks]], blocks, MICRO_BATCH, 2 * len(blocks))
            for blocks in self.replicas
        ]
        return dict(plan=unequal_plan(*plans), precision=precision) | (dict(zero_stage=self.zero) if self.zero else {})

    def __str__(self) -> str:
        stages = ", ".join(" + ".join(map(str, blocks)) for blocks in self.replicas)
        return f"blocks {stages}; tp {self.tp}" + (f", ZeRO {self.zero}" if self.zero else "")


class Pair(NamedTuple):
    """A model, the plan that saves it, and the plan that loads it."""

    model: str
    saved: Plan | Unequal
    loaded: Plan | Unequal
    precision: str = "fp32"


ONE, TP2, TP3, TP4 = Plan(), Plan(tp=2), Plan(tp=3), Plan(tp=4)
PP2, PP3, PP4, TP2PP2 = Plan(pp=2), Plan(pp=3), Plan(pp=4), Plan(tp=2, pp=2)
DP2, TP2DP2 = Plan(dp=2), Plan(tp=2, dp=2)
Z2, Z3, Z4 = Plan(dp=2, zero=1), Plan(dp=3, zero=1), Plan(dp=4, zero=1)
TP2Z2, PP2Z2, TP3Z2 = Plan(tp=2, dp=2, zero=1), Plan(pp=2, dp=2, zero=1), Plan(tp=3, dp=2, zero=1)
DEEPER, TP2_DEEPER = Unequal(((4,), (1, 3))), Unequal(((4,), (1, 3)), tp=2)
ZERO_DEEPER = Unequal(((4,), (1, 3)), zero=1)

PAIRS = (
    # GPT-2: a fused weight of queries, keys and values, an embedding that is tied to the head, and is padded.
    *(Pair("gpt2", saved, loaded) for saved, loaded in (
        (ONE, TP2), (TP2, ONE), (TP2, TP3), (TP3, TP4), (TP4, TP2PP2), (TP2PP2, PP4), (PP4, TP3), (PP3, DP2), (PP2, PP3)
    )),
    *(Pair("gpt2", saved, loaded, "bf16") for saved, loaded in (
        (Z2, Z3), (TP2Z2, PP2Z2), (PP2Z2, TP3Z2), (Z4, TP2), (TP2PP2, TP2Z2)
    )),
    # Llama: grouped heads, and an embedding and a head that are both padded.
    *(Pair("llama", saved, loaded) for saved, loaded in (
        (ONE, TP3), (TP3, TP2), (TP4, PP4), (PP3, TP4), (TP2PP2, TP2DP2), (PP4, TP2PP2)
    )),
    *(Pair("llama", saved, loaded, "bf16") for saved, loaded in (
        (Z3, Z2), (TP2Z2, TP3Z2), (PP2Z2, Z4), (TP3, Z2)
    )),
    # A vision transformer: tensors of up to four dimensions, and fused weights in rows.
    *(Pair("vit", saved, loaded) for saved, loaded in ((ONE, TP4), (TP4, TP3), (TP3, PP2), (PP4, TP2PP2))),
    *(Pair("vit", saved, loaded, "bf16") for saved, loaded in ((Z3, TP2Z2), (TP3Z2, Z2))),
    # Replicas that are not alike.
    *(Pair("gpt2", saved, loaded) for saved, loaded in ((DEEPER, TP3), (TP2_DEEPER, DEEPER))),
    *(Pair("llama", saved, loaded) for saved, loaded in ((PP4, TP2_DEEPER), (DEEPER, TP2PP2))),
    *(Pair("vit", saved, loaded, "bf16") for saved, loaded in ((Z3, ZERO_DEEPER), (ZERO_DEEPER, TP2))),
)  # fmt: skip


def save(pair: Pair, folder: Path, width: dict[str, Any]) -> tuple[runs.InMemory, list[float]]:
    """What all ranks hold, on rank 0, and losses."""
    run = runs.boosted(pair.model, runs.saving(folder, **pair.saved.options(pair.precision)), **width)
    runs.train(run, range(2))
    assert run.plugin.save(run.model, run.optimizer, step=2)
    run.plugin.wait_for_saves()
    return runs.gathered(run, everywhere=False), runs.train(run, range(2, 4))


def load(pair: Pair, folder: Path, width: dict[str, Any]) -> tuple[runs.InMemory, list[float], int, Start]:
    """What all ranks hold after loading, on rank 0, losses, and the bytes that this rank needs and has read."""
    run = runs.boosted(pair.model, runs.saving(folder, **pair.loaded.options(pair.precision)), **width)
    runs.train(run, [7])
    start = run.plugin.resume(run.model, run.optimizer)
    assert start.step == 2
    needed = sum(piece.data.numel() * piece.data.element_size() for piece in run.pieces)
    return runs.gathered(run, everywhere=False), runs.train(run, range(2, 4)), needed, start


class Outcome(NamedTuple):
    """What a pair has shown."""

    tensors: int
    different: int
    read_share: float
    """Bytes of tensors that are read, over those that are needed, by all ranks."""
    busiest_share: float
    """The most that is read by a rank, over the most that is needed by one."""
    loss_difference: float

    def misses(self, precision: str) -> bool:
        limit = MAX_LOSS_DIFFERENCE[precision]
        return bool(self.different) or self.read_share > MAX_READ_SHARE or self.loss_difference > limit


def reshard(pair: Pair, width: dict[str, Any]) -> Outcome:
    """Save and load, with a model of this width."""
    with tempfile.TemporaryDirectory() as folder:
        (expected, expected_losses), *_ = run_ranks(pair.saved.ranks, save, pair, Path(folder), width)
        loaded = run_ranks(pair.loaded.ranks, load, pair, Path(folder), width)
    found, losses, _, _ = loaded[0]
    different = runs.different_tensors(found, expected)
    read = sum(start.read_bytes for *_, start in loaded) / sum(needed for _, _, needed, _ in loaded)
    busiest = max(start.read_bytes for *_, start in loaded) / max(needed for _, _, needed, _ in loaded)
    difference = max(abs(own / other - 1) for own, other in zip(losses, expected_losses, strict=True))
    return Outcome(len(expected.tensors), len(different), read, busiest, difference)


def main() -> None:
    numbers = read_options(__doc__, pairs=tuple(range(len(PAIRS)))).pairs
    rows, missed = [], 0
    for number in numbers:
        pair = PAIRS[number]
        outcome = reshard(pair, WIDTHS[pair.model])
        missed += outcome.misses(pair.precision)
        rows.append(
            (
                str(number),
                f"{pair.model}, {pair.precision}",
                str(pair.saved),
                str(pair.loaded),
                f"{outcome.tensors - outcome.different} of {outcome.tensors}",
                f"{outcome.read_share:.3f}",
                f"{outcome.busiest_share:.3f}",
                f"{outcome.loss_difference:.1e}",
            )
        )
        print(f"pair {number}: {outcome}", file=sys.stderr)
    print_table(
        "Loading under another plan",
        ("pair", "model", "saved", "loaded", "equal tensors", "read / needed", "busiest", "loss difference"),
        rows,
    )
    print(f"{len(rows) - missed} of {len(rows)} pairs reach the aim")


if __name__ == "__main__":
    main()
