"""Estimate the layer times of a model on a GPU on which only other models were timed.

A pass of a layer takes ``c + p·parameters + a·activations`` per micro-batch. The terms stand for launches and
latencies, for matrix products (two operations per parameter and token; all models here have the same number of tokens
per sample), and for everything that reads or writes activations, such as softmax, masks and collectives. The three
coefficients are non-negative. They are fitted to the other models' layers on that GPU at that tensor-parallel degree,
up to the largest micro-batch that is estimated. The fit minimizes relative errors; all models have the same weight.

Models differ in more than these sizes. Therefore the estimate of the blocks is corrected on a *reference* GPU on which
the model and the others were all timed: it is divided by the mean ratio of fitted to measured time there.

A simpler method would scale the model's times on one GPU by the ratio of another model's times on the two GPUs. It is
not used, because it assumes that both models spend the same share of their time on matrix products and on memory
traffic. From A100-40 to V100-16, which has no TF32, it predicts for GPT-Neo-2.7, scaled with OPT-350, only about six
tenths of the measured time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from colossal_hetero.planner.profile.layer_profile import LayerSizes, LayerTimes, ModelProfile
from tests.support.layer_profiles import times_of

PASSES = ("forward_seconds", "backward_seconds")
"""Fields of a layer's times that are fitted."""


def estimate_times(
    model: ModelProfile, others: Sequence[ModelProfile], device: str, *, reference: str, micro_batches: Sequence[int]
) -> ModelProfile:
    """``model`` with estimated times on ``device`` added, for all tensor-parallel degrees that ``others`` have there.

    Args:
        model: The model to estimate.
        others: At least two models with the same number of tokens per sample, timed on ``device`` and ``reference``.
        device: The kind of GPU to estimate times for.
        reference: A kind of GPU on which ``model`` was timed as well; it sets the correction.
        micro_batches: Micro-batch sizes to estimate.
    """
    degrees = _common_degrees((*others,), device, [sizes.tensor_parallel for sizes in model.sizes])
    reference_degrees = _common_degrees((*others, model), reference, [sizes.tensor_parallel for sizes in model.sizes])
    times, errors, max_micro_batch = [], [], max(micro_batches)
    for name in PASSES:
        ratios = [_error(model, others, reference, degree, name, max_micro_batch) for degree in reference_degrees]
        errors.append(exp(mean(log(each) for each in ratios)))
    for degree in degrees:
        sizes = _sizes(model, degree)
        # Adam's time is proportional to the parameters; its seconds per byte differ little between models.
        per_byte = exp(mean(log(_step_per_byte(other, device, degree)) for other in others))
        update = tuple(round(per_byte * each, 9) for each in sizes.parameter_bytes)
        fits = [_FittedTimes(others, device, degree, name, max_micro_batch) for name in PASSES]
        for micro_batch in micro_batches:
            forward, backward = (
                tuple(round(s, 9) for s in fit.layers(sizes, model.before, model.after, micro_batch, error))
                for fit, error in zip(fits, errors, strict=True)
            )
            times.append(
                LayerTimes(
                    device=device,
                    tensor_parallel=degree,
                    micro_batch=micro_batch,
                    forward_seconds=forward,
                    backward_seconds=backward,
                    update_seconds=update,
                )
            )
    note = (
        f"{device}: estimated from {' and '.join(other.name for other in others)} there, corrected by the error on "
        f"{reference} ({', '.join(f'{100 * (error - 1):+.0f} %' for error in errors)} forward, backward)"
    )
    fields = {name: getattr(model, name) for name in ModelProfile.model_fields}
    source = f"{model.source}; {note}" if model.source else note
    return ModelProfile(**{**fields, "times": (*model.times, *times), "source": source})


class _FittedTimes:
    """Seconds of a pass of embedding, block and head as functions of their sizes, fitted to other models' times."""

    def __init__(
        self, others: Sequence[ModelProfile], device: str, degree: int, name: str, max_micro_batch: int
    ) -> None:
        self.coefficients = [
            _fit([_points(other, device, degree, name, kind, max_micro_batch) for other in others]) for kind in range(3)
        ]

    def layers(self, sizes: LayerSizes, before: int, after: int, micro_batch: int, error: float) -> list[float]:
        """Seconds of each layer. Those of blocks are divided by ``error``, the ratio of fitted to measured time."""
        count = len(sizes.parameter_bytes)
        kinds = [0] * before + [1] * (count - before - after) + [2] * after
        return [
            float(self.coefficients[kind] @ _features(sizes, layer, micro_batch, kind)) / (error if kind == 1 else 1.0)
            for layer, kind in enumerate(kinds)
        ]


def _features(sizes: LayerSizes, layer: int, micro_batch: int, kind: int) -> NDArray[np.float64]:
    """What the coefficients are multiplied with: 1, GB of parameters and GB of activations, times the micro-batch.

    ``kind`` is 0 for the embedding, 1 for a block and 2 for the head.
    """
    # An embedding reads a few rows only, not all of its parameters.
    parameters = 0 if kind == 0 else sizes.parameter_bytes[layer]
    return np.array([1.0, parameters * micro_batch / 1e9, sizes.activation_bytes[layer] * micro_batch / 1e9])


def _points(
    profile: ModelProfile, device: str, degree: int, name: str, kind: int, max_micro_batch: int
) -> list[tuple[NDArray[np.float64], float]]:
    """Features and seconds of embedding (kind 0), middle block (1) or head (2), for each micro-batch size."""
    sizes = _sizes(profile, degree)
    layer = (0, profile.layers // 2, profile.layers - 1)[kind]
    batches = [batch for batch in profile.micro_batches(device, degree) if batch <= max_micro_batch]
    seconds = [getattr(times_of(profile, device, degree, batch), name)[layer] for batch in batches]
    # A smaller micro-batch cannot take longer than a larger one; if it was measured so, the measurement was disturbed.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return [
        (_features(sizes, layer, batch, kind), max(each, 1e-9)) for batch, each in zip(batches, seconds, strict=True)
    ]


def _fit(models: Sequence[Sequence[tuple[NDArray[np.float64], float]]]) -> NDArray[np.float64]:
    """Non-negative coefficients that minimize the squared relative errors; each model has the same weight."""
    rows, values = [], []
    for points in models:
        weight = len(points) ** -0.5
        for features, seconds in points:
            rows.append(features / seconds * weight)
            values.append(weight)
    return np.asarray(nnls(np.array(rows), np.array(values))[0])


def _error(
    model: ModelProfile, others: Sequence[ModelProfile], device: str, degree: int, name: str, max_micro_batch: int
) -> float:
    """Mean ratio of fitted to measured time of the blocks of ``model`` on ``device``."""
    fit = _FittedTimes(others, device, degree, name, max_micro_batch)
    return exp(
        mean(
            log(float(fit.coefficients[1] @ features) / seconds)
            for features, seconds in _points(model, device, degree, name, 1, max_micro_batch)
        )
    )


def _step_per_byte(profile: ModelProfile, device: str, degree: int) -> float:
    """Seconds of the optimizer's step per byte of parameters."""
    times = times_of(profile, device, degree, profile.micro_batches(device, degree)[0])
    return sum(times.update_seconds) / sum(_sizes(profile, degree).parameter_bytes)


def _sizes(profile: ModelProfile, degree: int) -> LayerSizes:
    return next(sizes for sizes in profile.sizes if sizes.tensor_parallel == degree)


def _common_degrees(profiles: Sequence[ModelProfile], device: str, wanted: Sequence[int]) -> list[int]:
    """Those of the ``wanted`` tensor-parallel degrees at which all ``profiles`` were timed on ``device``."""
    return [each for each in wanted if all(each in p.tensor_parallel_degrees(device) for p in profiles)]
