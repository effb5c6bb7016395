"""Speeds of the ranks of a group, compared within the same iterations. An iteration with longer sequences or a larger
batch takes all ranks longer by the same factor, which is divided out. All ranks compute the same from the same numbers,
with operations that processors round equally."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import fmean, median, median_low
from typing import NamedTuple

from .config import BalanceConfig
from .modes import LayerKind, UnitWork
from .plan import RankTimes
from .work_times import MAX_OVERHEAD, Damping, WorkLine

WINDOW = 256  # maximum number of iterations from which speeds are computed
FEW = 8  # minimum number of iterations to measure the noise; with fewer it is :data:`ASSUMED_NOISE`
ASSUMED_NOISE = 0.03  # relative standard deviation of a rank's work over iterations
RECENT = 16  # iterations that are compared with those before, to notice a small change of speed
CERTAIN = 4.0
"""Number of standard errors from which a difference counts as a change; smaller ones of many occur by chance."""
STEADY_LENGTH = 0.05
"""Batches are taken to have equal lengths if the median deviation of iterations' common factors is below this."""
MAX_PREDICTION_ERROR = 0.4
"""Relative error of the work that a line predicts at a new load, from which the speed has changed at the same time."""


class KindWork(NamedTuple):
    """A rank's work for the layers of one kind in an iteration."""

    load: float
    movable: float  # seconds that are in proportion to the load, as far as the clock can tell
    fixed: float

    @property
    def seconds(self) -> float:
        return self.movable + self.fixed


@dataclass(frozen=True)
class _ComparedWorks:
    """Works ``[rank][kind]`` of one iteration, divided by the factor that it has in common."""

    factor: float
    works: tuple[tuple[KindWork, ...], ...]

    def total(self, rank: int) -> float:
        return fsum(work.seconds for work in self.works[rank])


class GroupSpeed:
    """The work of all ranks of a group as lines in their loads, and when it is time to decide again."""

    def __init__(self, full: Sequence[float], ranks: int, config: BalanceConfig) -> None:
        self._config = config
        self._lines = [[WorkLine(units) for units in full] for _ in range(ranks)]
        self._damping = [Damping(config.patience) for _ in range(ranks)]
        self._skip = config.warmup_iterations
        self.receive_factor = 1.0  # Φ2: relative time of a unit of another rank, until that has been measured
        self._window: deque[_ComparedWorks] = deque(maxlen=WINDOW)
        self._deviating: list[_ComparedWorks] = []
        self._before: _ComparedWorks | None = None  # the iteration before, if loads were the same
        self._runs = [0] * ranks
        self._expected: list[float] | None = None
        self._loads: list[list[float]] = []
        self._measured = 0
        self._settling = False
        self._factors: deque[float] = deque(maxlen=2 * RECENT)
        self._steps: list[deque[float]] = [deque(maxlen=WINDOW // 4) for _ in range(ranks)]
        self._noise = ASSUMED_NOISE

    def observe(self, works: Sequence[Sequence[KindWork]]) -> bool:
        """Take in ``works[rank][kind]`` of an iteration. Returns whether to decide: after the first iterations, when a
        rank's speed has changed, and when speeds are known clearly better from so many more iterations."""
        loads = [[work.load for work in of_rank] for of_rank in works]
        if loads != self._loads:
            self._change_loads(loads)
        if self._skip > 0:
            self._skip -= 1
            return False
        totals = [fsum(work.seconds for work in of_rank) for of_rank in works]
        if min(totals) <= 0.0:
            return False
        if self._expected is None:
            return self._begin(works, totals)
        ratios = [total / expected for total, expected in zip(totals, self._expected, strict=True)]
        iteration = _divided(works, self._common_factor(ratios))
        self._note_noise(iteration)
        if self._has_changed(iteration, ratios):
            return True
        if self._deviating:
            return False
        self._window.append(iteration)
        self._measured += 1
        if not self._settling:
            return self._refine()
        if len(self._window) < self._config.patience:
            return False
        self._settling = False
        self._learn()
        return True

    def _note_noise(self, iteration: _ComparedWorks) -> None:
        """Measure noise by ranks' work since the iteration before, also if their speed may have changed."""
        if self._before is not None:
            for rank, steps in enumerate(self._steps):
                steps.append(abs(iteration.total(rank) / self._before.total(rank) - 1.0))
            self._noise = max(_noise(steps) for steps in self._steps)
        self._before = iteration

    def _begin(self, works: Sequence[Sequence[KindWork]], totals: Sequence[float]) -> bool:
        iteration = _divided(works, fmean(totals))
        self._note_noise(iteration)
        self._window.append(iteration)
        self._measured += 1
        if len(self._window) < self._config.patience:
            return False
        # From now on works are in seconds of a usual iteration, and factors are relative to it.
        usual = median(iteration.factor for iteration in self._window)
        in_seconds = (
            _ComparedWorks(each.factor / usual, _divided(each.works, 1.0 / usual).works) for each in self._window
        )
        self._window = deque(in_seconds, maxlen=WINDOW)
        self._before = self._window[-1]
        self._learn()
        return True

    def _change_loads(self, loads: list[list[float]]) -> None:
        self._loads = loads
        self._before = None
        self._start_again([])
        if self._expected is not None:
            # In the first iteration with other loads, memory is allocated.
            self._skip = max(self._skip, 1)
            self._settling = True
            self._expected = [
                fsum(
                    line.line(self._noise, self.receive_factor)(load) for line, load in zip(lines, of_rank, strict=True)
                )
                for lines, of_rank in zip(self._lines, loads, strict=True)
            ]

    def _common_factor(self, ratios: Sequence[float]) -> float:
        """Length of the iteration relative to usual, from ranks' work relative to what was expected."""
        factor = _middle(ratios)
        if not self._settling:
            self._factors.append(factor)
        elif self._factors:
            usual = median(self._factors)
            if median(abs(each / usual - 1.0) for each in self._factors) < STEADY_LENGTH:
                # Batches have equal lengths, so a difference is an error of the prediction.
                return usual
        return factor

    def _has_changed(self, iteration: _ComparedWorks, ratios: Sequence[float]) -> bool:
        """True if a rank's speed has changed for long enough, in the same direction."""
        deviations = [(deviation, self._limit(rank)) for rank, deviation in enumerate(_deviations(ratios))]
        are_slow = [deviation > limit for deviation, limit in deviations]
        # If some ranks are slower, others only seem faster than the group.
        are_fast = [deviation < 1.0 / (1.0 + limit) - 1.0 and not any(are_slow) for deviation, limit in deviations]
        accepted, held = [], []
        for rank, damping in enumerate(self._damping):
            direction = are_slow[rank] - are_fast[rank]
            before = self._runs[rank]
            self._runs[rank] = direction + before if direction * before > 0 else direction
            run = abs(self._runs[rank])
            damping.observed(are_slow[rank] and run >= self._config.patience)
            if direction and run >= (damping.patience if are_slow[rank] else self._config.patience):
                accepted.append(rank)
            elif are_slow[rank]:
                held.append(rank)
        if not any(self._runs):
            self._deviating = []
            return False
        self._deviating.append(iteration)
        if not accepted:
            return False
        latest = self._deviating[-min(abs(self._runs[rank]) for rank in accepted) :]
        self._change_speeds([self._with_expected(each, held) for each in latest])
        return True

    def _limit(self, rank: int) -> float:
        """The relative difference from the expected work above which a rank has another speed."""
        if not self._settling:
            return max(self._config.threshold, 2.5 * self._noise)
        # With other loads, work was only predicted. At small loads overhead makes predictions less exact.
        least = min(load / line.full for load, line in zip(self._loads[rank], self._lines[rank], strict=True))
        return max(MAX_PREDICTION_ERROR, MAX_OVERHEAD / max(least, 1e-3))

    def _with_expected(self, iteration: _ComparedWorks, ranks: Sequence[int]) -> _ComparedWorks:
        """The iteration with the work that is expected of these ranks, whose slowness may not last."""
        works = list(iteration.works)
        for rank in ranks:
            parts = []
            for load, line in zip(self._loads[rank], self._lines[rank], strict=True):
                here = line.line(self._noise, self.receive_factor)
                movable = min(here.slope * load, here(load))
                parts.append(KindWork(load, movable, here(load) - movable))
            works[rank] = tuple(parts)
        return _ComparedWorks(iteration.factor, tuple(works))

    def _change_speeds(self, iterations: Sequence[_ComparedWorks]) -> None:
        """Set other speeds of ranks whose work differs clearly from what was expected."""
        assert self._expected is not None
        changed = []
        for rank, lines in enumerate(self._lines):
            now = median(each.total(rank) for each in iterations) / self._expected[rank]
            if abs(now - 1.0) <= self._limit(rank) / 2:
                continue
            changed.append(rank)
            for kind, line in enumerate(lines):
                works = [each.works[rank][kind] for each in iterations]
                if not self._settling:
                    line.speed_changed(median(each.seconds for each in works), median(each.movable for each in works))
        self._factors.clear()
        self._factors.extend(each.factor for each in iterations)
        self._start_again(iterations)
        self._learn()
        if self._settling:
            self._settling = False
            for rank in changed:
                for line in self._lines[rank]:
                    line.forget_others()

    def _refine(self) -> bool:
        count = self._measured
        if count % RECENT == 0 and len(self._window) >= 2 * RECENT and self._has_drifted():
            self._start_again(list(self._window)[-RECENT:])
            self._learn()
            return True
        # When their number has doubled; later, once in a quarter of a window.
        if count < max(2, self._config.patience) or (count & (count - 1) if count < WINDOW else count % (WINDOW // 4)):
            return False
        self._learn()
        return True

    def _has_drifted(self) -> bool:
        """True if a rank's work in the latest iterations differs from that before by more than noise explains."""
        latest, before = list(self._window)[-RECENT:], list(self._window)[:-RECENT]
        for rank in range(len(self._lines)):
            now = median(iteration.total(rank) for iteration in latest)
            then = median(iteration.total(rank) for iteration in before)
            if abs(now / then - 1.0) > 1.25 * CERTAIN * self._noise * sqrt(1 / len(latest) + 1 / len(before)):
                return True
        return False

    def _start_again(self, iterations: Sequence[_ComparedWorks]) -> None:
        self._window = deque(iterations, maxlen=WINDOW)
        self._measured = len(self._window)
        self._deviating, self._runs = [], [0] * len(self._lines)

    def _learn(self) -> None:
        """Set the lines at the present loads to the medians of the window."""
        for rank, lines in enumerate(self._lines):
            for kind, line in enumerate(lines):
                works = [iteration.works[rank][kind] for iteration in self._window]
                line.measured(
                    works[-1].load,
                    median(work.seconds for work in works),
                    median(work.movable for work in works),
                    len(works),
                )
        self._expected = [fsum(line.present_seconds for line in lines) for lines in self._lines]

    @property
    def is_attentive(self) -> bool:
        """True if every iteration matters now: speeds are not known yet, or a rank's speed may have changed."""
        return not self.is_known or self._skip > 0 or self._settling or any(self._runs)

    @property
    def is_known(self) -> bool:
        return self._expected is not None

    @property
    def uncertainty(self) -> float:
        """Relative difference of speeds below which it may be chance."""
        # The first differences do not tell noise from a change of speed, so they only make decisions more careful.
        noise = max(self._noise, *(median(steps) / 0.954 for steps in self._steps if 0 < len(steps) < FEW), 0.0)
        # The median of n values has 1.25/√n of their standard deviation.
        return CERTAIN * 1.25 * noise / sqrt(max(1, len(self._window)))

    def unit_work(self, kinds: Sequence[LayerKind]) -> UnitWork:
        """The work for each of all ``kinds``."""
        lines = [
            [of_rank[kind].line(self._noise, self.receive_factor) for of_rank in self._lines]
            for kind in range(len(kinds))
        ]
        return UnitWork(kinds, lines, self.scale)

    def at_full_share(self, rank: int, work_seconds: float, movable: float, loads: Sequence[float]) -> RankTimes:
        """A rank's times at its full share, from those of an iteration with these ``loads`` by kind."""
        pairs = list(zip(self._lines[rank], loads, strict=True))
        if all(load == line.full for line, load in pairs):
            return RankTimes(work_seconds, movable)
        if self._expected is None:
            dense = movable * len(pairs) / fsum(load / line.full for line, load in pairs)
        else:
            lines = [line.line(self._noise, self.receive_factor) for line in self._lines[rank]]
            more = fsum(line.slope * (line.full - load) for line, load in zip(lines, loads, strict=True))
            dense = max(movable + self.scale * more, 1e-3 * movable)
        return RankTimes(work_seconds - movable + dense, dense)

    def equal_work(self) -> list[RankTimes]:
        """Times of all balanced layers with a rank's full share of their work, by rank."""
        times = []
        for rank in range(len(self._lines)):
            lines = [line.line(self._noise, self.receive_factor) for line in self._lines[rank]]
            present = fsum(line.seconds for line in lines)
            # A steep line through a much larger load may be below zero at the full share.
            work = self.scale * max(fsum(line(line.full) for line in lines), 1e-3 * present)
            times.append(RankTimes(work, min(work, self.scale * fsum(line.slope * line.full for line in lines))))
        return times

    @property
    def scale(self) -> float:
        """Seconds that a second of a usual iteration takes in the present ones."""
        return median(iteration.factor for iteration in self._window) if self._window else 1.0

    def relieved(self, shares: Sequence[float]) -> None:
        for damping, share in zip(self._damping, shares, strict=True):
            damping.relieved(share)


def _noise(steps: Sequence[float]) -> float:
    """Relative standard deviation of a rank's work in one iteration, from differences of successive iterations."""
    # Of a normal distribution, half of the differences of two values are within 0.954 standard deviations.
    return median(steps) / 0.954 if len(steps) >= FEW else ASSUMED_NOISE


def _middle(ratios: Sequence[float]) -> float:
    """A value that ranks with another speed do not change, if they are fewer than the others."""
    return fmean(ratios) if len(ratios) == 2 else median_low(ratios)


def _deviations(ratios: Sequence[float]) -> list[float]:
    """Slowdown of each rank relative to the others, from its work relative to what was expected."""
    if len(ratios) == 2:
        return [ratios[0] / ratios[1] - 1.0, ratios[1] / ratios[0] - 1.0]
    middle = _middle(ratios)
    return [ratio / middle - 1.0 for ratio in ratios]


def _divided(works: Sequence[Sequence[KindWork]], factor: float) -> _ComparedWorks:
    return _ComparedWorks(
        factor,
        tuple(
            tuple(KindWork(work.load, work.movable / factor, work.fixed / factor) for work in of_rank)
            for of_rank in works
        ),
    )
