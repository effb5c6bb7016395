"""The column selectors against brute force, and what the incremental update of priorities is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.config import BalanceConfig, Pruning
from colossal_hetero.balance.pruning import SAMPLED_ROWS, ColumnSelector, WeightVariation, make_selector
from colossal_hetero.layers.workload import Workload

RULES = ("random", "priority", "priority-diff", "norm-product")
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda matrix: matrix,
    "conv1d": lambda matrix: matrix.t().contiguous().t(),  # the view [N, L] of a weight stored as [L, N]
}
DTYPES = (torch.float32, torch.bfloat16)
every_weight = [
    pytest.param(layout, dtype, id=f"{layout}-{dtype}".replace("torch.", "")) for layout in LAYOUTS for dtype in DTYPES
]


def weight_and_input(
    layout: str, dtype: torch.dtype, outputs: int = 7, columns: int = 13, rows: int = 11, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``W [N, L]`` stored in the given layout and ``X [M, L]``."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, columns, generator=generator).to(dtype)
    return LAYOUTS[layout](weight), torch.randn(rows, columns, generator=generator).to(dtype)


def indices(kept: Tensor) -> list[int]:
    assert kept.dtype == torch.int64
    return kept.tolist()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("layout, dtype", every_weight)
def test_kept_columns_are_as_many_as_asked_for_and_ascending(rule: str, layout: str, dtype: torch.dtype) -> None:
    weight, x = weight_and_input(layout, dtype)
    selector = make_selector(rule, weight, seed=3)
    for count in (1, 5, 12, 13):
        for _ in range(3):
            kept = indices(selector(x, weight, count))
            assert len(kept) == count
            assert kept == sorted(set(kept)), "not ascending, or not unique"
            assert kept[0] >= 0 and kept[-1] < 13
        weight = weight + 0.01 * weight.abs()
        selector.end_interval(weight)


def test_random_draws_anew_and_by_the_seed() -> None:
    weight, x = weight_and_input("linear", torch.float32, columns=40)

    def draws(seed: int) -> list[list[int]]:
        selector = make_selector("random", weight, seed)
        return [indices(selector(x, weight, 20)) for _ in range(5)]

    assert draws(1) == draws(1)
    assert draws(1) != draws(2)
    assert len({tuple(drawn) for drawn in draws(1)}) == 5
    counts = np.bincount(np.concatenate(draws(1) + draws(2) + draws(3) + draws(4)), minlength=40)
    assert (counts > 0).all(), "some column is never kept"


@pytest.mark.parametrize("layout, dtype", every_weight)
@pytest.mark.parametrize("seed", range(3))
def test_norm_product_is_the_top_k_of_the_products_of_norms(layout: str, dtype: torch.dtype, seed: int) -> None:
    weight, x = weight_and_input(layout, dtype, seed=seed)
    score = [float(x[:, i].float().norm() * weight[:, i].float().norm()) for i in range(13)]
    expected = sorted(sorted(range(13), key=lambda i: -score[i])[:6])
    assert indices(make_selector("norm-product", weight, 0)(x, weight, 6)) == expected


def test_norm_product_samples_rows_of_a_long_input() -> None:
    weight = torch.ones(3, 4)
    x = torch.zeros(5 * SAMPLED_ROWS, 4)
    x[::5] = torch.tensor([0.0, 2.0, 0.0, 1.0])  # the rows that are looked at
    assert indices(make_selector("norm-product", weight, 0)(x, weight, 2)) == [1, 3]


def test_norm_product_does_not_overflow_in_half_precision() -> None:
    """A column's norm may be above the largest number of its dtype (65504 in fp16)."""
    x = torch.full((64, 3), 3e4, dtype=torch.float16)
    weight = torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float16)
    assert indices(make_selector("norm-product", weight, 0)(x, weight, 2)) == [1, 2]


# Weight variation ------------------------------------------------------------------------------------------------


def settle(selector: ColumnSelector, weight: Tensor, change: Tensor) -> Tensor:
    """Change ``weight`` and end an interval in which nothing was pruned."""
    weight = weight + change
    selector.end_interval(weight)
    return weight


@pytest.mark.parametrize("layout, dtype", every_weight)
def test_variation_by_hand(layout: str, dtype: torch.dtype) -> None:
    """``δ_i = mean_r |w_ri^t − w_ri^{t−1}|``, of the last interval only."""
    weight = LAYOUTS[layout](torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=dtype))
    selector = WeightVariation(weight, seed=0)
    change = torch.tensor([[0.5, -0.25, 0.0, 1.0], [-0.5, 0.0, 0.25, -3.0]], dtype=dtype)
    weight = settle(selector, weight, change)  # δ = [0.5, 0.125, 0.125, 2]
    x = torch.zeros(1, 4, dtype=dtype)
    assert indices(selector(x, weight, 1)) == [3]
    assert indices(selector(x, weight, 2)) == [0, 3]
    assert selector.candidate_share(0.125) == 0.0  # δ < θ, not ≤
    assert selector.candidate_share(0.2) == 0.5
    assert selector.candidate_share(0.6) == 0.75
    assert selector.candidate_share(9.0) == 1.0
    selector = WeightVariation(weight, seed=0)
    weight = settle(selector, weight, change)
    weight = settle(selector, weight, change.flip(1))  # δ = [2, 0.125, 0.125, 0.5]: the first interval is over
    assert indices(selector(x, weight, 1)) == [0]
    assert indices(selector(x, weight, 2)) == [0, 3]


class ForgetfulVariation(WeightVariation):
    """Without the incremental update: a pruned column counts as one that did not vary."""

    def end_interval(self, weight: Tensor) -> None:
        self._pruned.zero_()
        super().end_interval(weight)


def intervals_without(selector: WeightVariation, weight: Tensor, count: int, intervals: int) -> list[list[int]]:
    """Train for some intervals, kept columns varying less each time (as they converge), pruned ones not at all."""
    pruned = []
    for interval in range(intervals):
        kept = selector(torch.zeros(1, weight.shape[1]), weight, count)
        weight = weight.clone()
        weight[:, kept] += 0.5**interval
        selector.end_interval(weight)
        pruned.append(sorted(set(range(weight.shape[1])) - set(indices(kept))))
    return pruned


def test_pruned_columns_come_back_thanks_to_the_incremental_update() -> None:
    start = torch.zeros(3, 6)
    for kind, returns in ((WeightVariation, True), (ForgetfulVariation, False)):
        selector = kind(start, seed=0)
        # All columns vary in a first interval without pruning; 0 and 1 least, so that these are pruned first.
        weight = settle(selector, start, torch.tensor([0.8, 0.9, 1.0, 1.1, 1.2, 1.3]))
        pruned = intervals_without(selector, weight, count=4, intervals=8)
        assert pruned[0] == [0, 1]
        came_back = any(0 not in columns for columns in pruned) and any(1 not in columns for columns in pruned)
        assert came_back is returns, f"{kind.__name__} pruned {pruned}"


def test_columns_pruned_in_a_part_of_an_interval_keep_their_variation() -> None:
    """The ratio may change within an interval; a column that any plan in it pruned was not trained throughout."""
    weight, x = torch.zeros(2, 4), torch.zeros(1, 4)
    selector = WeightVariation(weight, seed=0)
    weight = settle(selector, weight, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert indices(selector(x, weight, 3)) == [1, 2, 3]
    assert indices(selector(x, weight, 4)) == [0, 1, 2, 3]
    selector.end_interval(weight + torch.tensor([9.0, 1.0, 0.5, 0.25]))
    assert indices(selector(x, weight, 2)) == [0, 1]  # δ = [1 (kept), 1, ½, ¼]


# Through the applier ---------------------------------------------------------------------------------------------


class PlainLayer:
    """What :class:`Applier` uses of a layer, without tensor parallelism."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.workload: Workload | None = None
        self.begun = 0

    @property
    def contraction_columns(self) -> int:
        return self.matrix.shape[1]

    def assign(self, workload: Workload | None, migration: None = None) -> None:
        self.workload = workload

    def begin_iteration(self) -> None:
        self.begun += 1

    def kept(self) -> list[int]:
        assert self.workload is not None
        count = self.workload.kept_count(self.contraction_columns)
        return indices(self.workload.select(torch.zeros(1, self.contraction_columns), self.matrix, count))


def resizer(layers: dict[str, PlainLayer], interval: int = 2, **options: Any) -> Applier:
    return Applier(layers, [], BalanceConfig(mode="resize", pruning=Pruning(resizing="column", **options)), interval)  # type: ignore[arg-type]


def test_a_rank_that_becomes_slow_knows_how_weights_varied_before() -> None:
    """Stragglers of SEMI's Figs. 7 to 9 change with each epoch."""
    layer = PlainLayer(torch.zeros(3, 6))
    resize = resizer({"layer": layer}, interval=3, priority="priority")

    def epoch(*changes: float) -> None:
        for _ in range(3):
            layer.matrix += torch.tensor(changes)
            resize.end_iteration()

    epoch(0.6, 0.1, 0.5, 0.2, 0.4, 0.3)
    epoch(0.3, 0.6, 0.1, 0.5, 0.2, 0.4)
    resize.prune(0.5)
    assert layer.kept() == [1, 3, 5]
    epoch(0.0, 0.1, 0.0, 0.1, 0.0, 0.1)
    resize.prune(0.0)
    epoch(0.1, 0.2, 0.6, 0.3, 0.5, 0.4)
    resize.prune(0.5)
    assert layer.kept() == [2, 4, 5]


def test_a_changed_ratio_keeps_the_priorities() -> None:
    layer = PlainLayer(torch.zeros(3, 8))
    resize = resizer({"layer": layer}, interval=1, priority="priority")
    resize.prune(0.5)
    first = layer.kept()
    layer.matrix[:, first] += 1.0
    resize.end_iteration()
    resize.prune(0.25)
    assert set(layer.kept()) > set(range(8)) - set(first), "columns without a variation do not come first"
    before = layer.kept()
    resize.prune(0.0)
    resize.prune(0.25)
    assert layer.kept() == before, "a rank that is slow again has forgotten its priorities"


def test_priority_diff_prunes_quiet_layers_more_within_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"quiet": (30, 200), "half": (20, 100), "busy": (50, 160)}
    layers = {name: PlainLayer(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    resize = resizer(layers, interval=2, priority="priority-diff", variation_threshold=1e-3)
    ratio = 0.4
    resize.prune(ratio)
    costs = {name: layer.matrix.numel() for name, layer in layers.items()}

    def ratios() -> dict[str, float]:
        return {name: layer.workload.prune for name, layer in layers.items() if layer.workload}

    def budget(of: dict[str, float]) -> float:
        return sum(costs[name] * of[name] for name in layers) / sum(costs.values())

    assert ratios() == pytest.approx(dict.fromkeys(layers, ratio))  # nothing is known yet
    for _ in range(4):  # two intervals, so that every column has a variation
        for layer in layers.values():
            layer.kept()
        layers["busy"].matrix += 0.01
        layers["half"].matrix[:, :50] += 0.01
        resize.end_iteration()
    resize.end_iteration()  # ratios change one iteration after an interval has ended
    after = ratios()
    assert after["quiet"] > after["half"] > after["busy"] > 0
    assert budget(after) == pytest.approx(ratio)
    assert resize.shares.resized == pytest.approx(ratio, abs=0.01)  # up to whole columns
    for name, layer in layers.items():
        assert len(layer.kept()) == layer.contraction_columns - round(after[name] * layer.contraction_columns)
