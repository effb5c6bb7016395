"""A plan in a list of plans, best first, with a reason for its place."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ..profile.layer_profile import ModelProfile
from .plan import Plan, StagePlan

MIN_GAIN = 1.01
"""Factor by which a plan whose replicas are not alike must be faster than one with equal replicas to come before it,
and one with ZeRO stage 1 or recomputation than one without: predicted times are wrong by more than 1 %
(``benchmarks/pipeline``, ``benchmarks/planner``), and simple plans leave more choices, such as Colossal-AI's own
plugin, other schedules, ZeRO stage 2 and LoRA."""

ROUNDING = 1e-9  # times that differ by a smaller share count as equal


@dataclass(frozen=True)
class RankedPlan:
    plan: Plan
    reason: str  # reason why it is the best, or how much slower it is than the best, and what most of that comes from


def ranking_seconds(seconds: float, *, equal: bool, plain: bool = True) -> float:
    """Seconds by which plans are compared, with :data:`MIN_GAIN` if replicas are not alike, and again if a plan is not
    plain: if it uses ZeRO stage 1 or recomputation."""
    return seconds * (1.0 if equal else MIN_GAIN) * (1.0 if plain else MIN_GAIN)


def ranking_of(plan: Plan, seconds: float | None = None) -> float:
    """:func:`ranking_seconds` of a plan, by its predicted time or by other ``seconds``."""
    given = plan.iteration_seconds if seconds is None else seconds
    return ranking_seconds(given, equal=plan.symmetric, plain=plan.plain)


def compared(seconds: float, best_seconds: float, what: str = "it is not as simple") -> str:
    """Difference of a plan from the best one, e.g. "3.1 % slower". A faster one is behind it because of ``what``."""
    percent = 100 * (seconds / best_seconds - 1)
    if percent >= -100 * ROUNDING:
        return f"{max(percent, 0.0):.1f} % slower"
    return f"{-percent:.1f} % faster, but {what}, which must gain {100 * (MIN_GAIN - 1):.0f} %"


# [Note: how sure a prediction is] The times of a kind of device, at a degree and a size of micro-batch, were measured
# together, with a relative standard error that the profile has, so they are all wrong by one unknown factor near to 1.
# Such factors are drawn at random, and the formula (``stages/pipeline.py``) is computed with each of them. The
# draws of a kind, degree and size are the same for every plan, so two plans that use the same times are wrong in the
# same direction, and the ratio of their times can be surer than each of them. Errors of bandwidths, and of the model
# itself (``benchmarks/planner``), are not in these numbers.


CERTAIN = 2.0
"""Plans that differ by less than so many standard errors count as equally fast. Of normal errors, 95 % are smaller."""

DRAWS = 512  # half of them are the inverse of the others, so that the mean error is 0


def prediction_error(plan: Plan, profile: ModelProfile) -> float:
    """Relative standard error of the predicted time of an iteration; see [Note: how sure a prediction is]."""
    return _spread(_logarithms(plan, profile))


def difference_error(plan: Plan, other: Plan, profile: ModelProfile) -> float:
    """Standard error of the logarithm of the ratio of two predicted times."""
    return _spread(_logarithms(plan, profile) - _logarithms(other, profile))


def ties_resolved(ranked: Sequence[RankedPlan], profile: ModelProfile) -> list[RankedPlan]:
    """The plans, first the simplest (:func:`_complexity`) of those that the profile cannot tell from the fastest."""
    fastest, *others = ranked
    margins = [CERTAIN * difference_error(fastest.plan, each.plan, profile) for each in others]
    tied = [
        each
        for each, margin in zip(others, margins, strict=True)
        if margin > 0 and -ROUNDING <= _behind(each.plan, fastest.plan) <= margin
    ]
    if not tied:
        return list(ranked)
    words = {
        id(each): f"{each.reason}; a tie, because the times of the profile leave ±{margin:.1%} open"
        for each, margin in zip(others, margins, strict=True)
        if each in tied
    }
    simplest = min([fastest, *tied], key=lambda each: _complexity(each.plan))
    if simplest is fastest:
        return [replace(each, reason=words.get(id(each), each.reason)) for each in ranked]
    first = RankedPlan(
        simplest.plan,
        f"the simplest of {len(tied) + 1} plans that the times of the profile cannot tell apart; the fastest is "
        f"predicted to be {_behind(simplest.plan, fastest.plan):.1%} faster",
    )
    second = RankedPlan(fastest.plan, "the fastest by its prediction, but not simpler, and the difference is a tie")
    rest = [replace(each, reason=words.get(id(each), each.reason)) for each in others if each is not simplest]
    return [first, second, *rest]


def _behind(plan: Plan, fastest: Plan) -> float:
    return math.log(plan.iteration_seconds / fastest.iteration_seconds)


def _spread(values: NDArray[np.float64]) -> float:
    """Standard deviation; exactly 0 for equal values."""
    return float(values.std()) if values.max() > values.min() else 0.0


def _logarithms(plan: Plan, profile: ModelProfile) -> NDArray[np.float64]:
    """Logarithms of the time of an iteration for the factors that are drawn, ``[draws]``, up to a constant."""
    form = plan.tensor_parallel, plan.micro_batch
    devices = {stage.device for replica in plan.replicas for stage in replica.stages}
    factors_of = {device: np.exp(profile.relative_error(device, *form) * _drawn((device, *form))) for device in devices}
    pipelines = []
    for micro_batches, stages in {(each.micro_batches, tuple(map(_times, each.stages))) for each in plan.replicas}:
        factors = np.stack([factors_of[device] for device, _ in stages])
        whole, passes, update = np.array([times for _, times in stages]).T[:, :, None]
        seconds = whole + passes * (factors - 1.0)
        pipelines.append(
            seconds.sum(axis=0) + (micro_batches - 1) * seconds.max(axis=0) + (update * factors).max(axis=0)
        )
    return np.asarray(np.log(np.max(pipelines, axis=0) + plan.synchronization_seconds))


def _times(stage: StagePlan) -> tuple[str, tuple[float, float, float]]:
    """Device and seconds: of a micro-batch, of its passes, and of the update."""
    passes = stage.forward_seconds + stage.backward_seconds
    return stage.device, (stage.micro_batch_seconds, passes, stage.update_seconds)


@cache
def _drawn(measured: tuple[str, int, int]) -> NDArray[np.float64]:
    """Random logarithms of the factors for a kind of device, degree and samples with a relative error of 1."""
    half = np.random.default_rng(zlib.crc32(repr(measured).encode())).normal(size=DRAWS // 2)
    return np.concatenate([half, -half])


def _complexity(plan: Plan) -> tuple[bool, bool, bool, int, int, bool, int]:
    return (
        not plan.plain,
        not plan.symmetric,
        plan.schedule != "1f1b",
        max(len(replica.stages) for replica in plan.replicas),
        plan.tensor_parallel,
        any(max(each.layers_per_stage) - min(each.layers_per_stage) > 1 for each in plan.replicas),
        plan.world_size,
    )
