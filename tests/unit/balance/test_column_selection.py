"""The column selectors against brute force, and what the incremental update of priorities is for."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from colossal_hetero.balance.apply import Applier
from colossal_hetero.balance.config import BalanceConfig, Pruning
from colossal_hetero.balance.pruning import SAMPLED_ROWS, WeightVariation, make_selector
from colossal_hetero.layers.workload import Workload

every_weight = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_layout = pytest.mark.parametrize("transposed", [False, True])


def laid_out(matrix: Tensor, transposed: bool) -> Tensor:
    """``[N, L]``; with ``transposed`` the view of a weight that is stored as ``[L, N]``."""
    return matrix.t().contiguous().t() if transposed else matrix


def weight_and_input(
    transposed: bool = False, dtype: torch.dtype = torch.float32, columns: int = 13, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """``W [7, L]`` stored in the given layout and ``X [11, L]``."""
    generator = torch.Generator().manual_seed(seed)
    weight, x = (torch.randn(rows, columns, generator=generator).to(dtype) for rows in (7, 11))
    return laid_out(weight, transposed), x


def indices(kept: Tensor) -> list[int]:
    assert kept.dtype == torch.int64
    return kept.tolist()


def test_random_draws_anew_and_by_the_seed() -> None:
    weight, x = weight_and_input(columns=40)

    def draws(seed: int) -> list[list[int]]:
        selector = make_selector("random", weight, seed)
        return [indices(selector(x, weight, 20)) for _ in range(5)]

    assert draws(1) == draws(1) != draws(2)
    assert len({tuple(drawn) for drawn in draws(1)}) == 5
    assert all(len(drawn) == 20 and drawn == sorted(set(drawn)) for drawn in draws(1))
    counts = np.bincount(np.concatenate([drawn for seed in range(1, 5) for drawn in draws(seed)]), minlength=40)
    assert (counts > 0).all(), "some column is never kept"


@every_layout
@every_weight
@pytest.mark.parametrize("seed", range(3))
def test_norm_product_is_the_top_k_of_the_products_of_norms(transposed: bool, dtype: torch.dtype, seed: int) -> None:
    weight, x = weight_and_input(transposed, dtype, seed=seed)
    score = [float(x[:, i].float().norm() * weight[:, i].float().norm()) for i in range(13)]
    expected = sorted(sorted(range(13), key=lambda i: -score[i])[:6])
    assert indices(make_selector("norm-product", weight, 0)(x, weight, 6)) == expected


def test_norm_product_samples_rows_of_a_long_input_and_does_not_overflow_in_half_precision() -> None:
    x = torch.zeros(5 * SAMPLED_ROWS, 4)
    x[::5] = torch.tensor([0.0, 2.0, 0.0, 1.0])  # the rows that are looked at
    assert indices(make_selector("norm-product", x, 0)(x, torch.ones(3, 4), 2)) == [1, 3]
    # A column's norm may be above the largest number of its dtype (65504 in fp16).
    x, weight = torch.full((64, 3), 3e4, dtype=torch.half), torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.half)
    assert indices(make_selector("norm-product", weight, 0)(x, weight, 2)) == [1, 2]


def settle(selector: Any, weight: Tensor, change: Tensor) -> Tensor:
    """Change ``weight`` and end an interval in which nothing was pruned."""
    weight = weight + change
    selector.end_interval(weight)
    return weight


@every_layout
@every_weight
def test_variation_by_hand(transposed: bool, dtype: torch.dtype) -> None:
    """``δ_i = mean_r |w_ri^t − w_ri^{t−1}|``, of the last interval only."""
    start = laid_out(torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], dtype=dtype), transposed)
    selector = WeightVariation(start, seed=0)
    change = torch.tensor([[0.5, -0.25, 0.0, 1.0], [-0.5, 0.0, 0.25, -3.0]], dtype=dtype)
    weight = settle(selector, start, change)  # δ = [0.5, 0.125, 0.125, 2]
    x = torch.zeros(1, 4, dtype=dtype)
    assert [indices(selector(x, weight, count)) for count in (1, 2)] == [[3], [0, 3]]
    # δ < θ, not ≤
    assert [selector.candidate_share(each).item() for each in (0.125, 0.2, 0.6, 9.0)] == [0.0, 0.5, 0.75, 1.0]
    selector = WeightVariation(weight, seed=0)
    weight = settle(selector, weight, change)
    weight = settle(selector, weight, change.flip(1))  # δ = [2, 0.125, 0.125, 0.5]: the first interval is over
    assert [indices(selector(x, weight, count)) for count in (1, 2)] == [[0], [0, 3]]


class PlainLayer:
    """What :class:`Applier` uses of a layer, without tensor parallelism."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix
        self.workload: Workload | None = None
        self.contraction_columns = matrix.shape[1]

    def assign(self, workload: Workload | None, migration: None = None) -> None:
        self.workload = workload

    def begin_iteration(self) -> None: ...

    def kept(self) -> list[int]:
        assert self.workload is not None
        count = self.workload.kept_count(self.contraction_columns)
        return indices(self.workload.select(torch.zeros(1, self.contraction_columns), self.matrix, count))


def resizer(interval: int, *layers: PlainLayer, **options: Any) -> Applier:
    config = BalanceConfig(mode="resize", pruning=Pruning(resizing="column", **options))
    return Applier(dict(enumerate(layers)), [], config, interval)  # type: ignore[arg-type]


def test_a_rank_that_becomes_slow_knows_how_weights_varied_before() -> None:
    """Stragglers of SEMI's Figs. 7 to 9 change with each epoch."""
    layer = PlainLayer(torch.zeros(3, 6))
    resize = resizer(3, layer, priority="priority")

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


def test_priority_diff_prunes_quiet_layers_more_within_the_budget() -> None:
    generator, ratio = torch.Generator().manual_seed(0), 0.4
    layers = [PlainLayer(torch.randn(shape, generator=generator)) for shape in ((30, 200), (20, 100), (50, 160))]
    _, half, busy = layers
    resize = resizer(2, *layers, priority="priority-diff", variation_threshold=1e-3)
    resize.prune(ratio)

    def ratios() -> list[float]:
        return [layer.workload.prune for layer in layers if layer.workload]

    assert ratios() == pytest.approx([ratio] * 3)  # nothing is known yet
    for _ in range(4):  # two intervals, so that every column has a variation
        for layer in layers:
            layer.kept()
        busy.matrix += 0.01
        half.matrix[:, :50] += 0.01
        resize.end_iteration()
    resize.end_iteration()  # ratios change one iteration after an interval has ended
    after = ratios()
    assert after == sorted(after, reverse=True) and after[-1] > 0
    assert np.average(after, weights=[layer.matrix.numel() for layer in layers]) == pytest.approx(ratio)
    assert resize.shares.resized == pytest.approx(ratio, abs=0.01)  # up to whole columns
    for layer, found in zip(layers, after, strict=True):
        assert len(layer.kept()) == layer.contraction_columns - round(found * layer.contraction_columns)
