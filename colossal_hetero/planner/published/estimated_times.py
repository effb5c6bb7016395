"""Layer times of a model on a GPU that it was not timed on, from other models' times there.

A layer's pass takes ``c + p·parameters + a·activations`` per micro-batch: launches and latencies, the matrix products
(two operations per parameter and token; all models here have the same tokens per sample), and everything that reads or
writes activations, softmax, masks and collectives among them. The three coefficients, none negative, are fitted to the
relative errors of the other models' layers on that GPU at that tensor-parallel degree, up to the largest micro-batch
that is estimated; models count alike.

Models differ in more than these sizes. By how much this misses the model is known on a *reference* GPU where it was
timed itself, beside the others; what is predicted is divided by the mean miss there.

The plainer way, another GPU's times of the model scaled by how much faster the new one runs another model, is not used:
it takes the mixture of products and of memory traffic to be that of the other model. From A100-40 to V100-16, which has
no TF32, it predicts GPT-Neo-2.7 from OPT-350 to run in about six tenths of the time that it really takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import mean

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from ..profile.layer_profile import LayerSizes, LayerTimes, ModelProfile

__all__ = ["estimate_times"]

PASSES = ("forward_seconds", "backward_seconds")


def estimate_times(
    model: ModelProfile, others: Sequence[ModelProfile], device: str, *, reference: str, micro_batches: Sequence[int]
) -> ModelProfile:
    """``model`` with estimated times on ``device`` added, at all degrees at which ``others`` were timed there.

    Args:
        others: models of as many tokens per sample, timed on ``device`` and on ``reference``; two or more.
        reference: a kind of GPU where ``model`` was timed as well; it sets the correction.
        micro_batches: to estimate.

    Raises:
        ValueError: ``model`` was timed on ``device``, fewer than two others, or none of their degrees in common.
    """
    if device in model.devices:
        raise ValueError(f"{model.name} was timed on {device}; nothing is to be estimated")
    if len(others) < 2:
        raise ValueError(f"{len(others)} other models; two or more are needed to tell products from memory traffic")
    degrees = _common_degrees((*others,), device, [sizes.tensor_parallel for sizes in model.sizes])
    checked = _common_degrees((*others, model), reference, [sizes.tensor_parallel for sizes in model.sizes])
    times, misses, largest = [], [], max(micro_batches)
    for name in PASSES:
        found = [_miss(model, others, reference, degree, name, largest) for degree in checked]
        misses.append(exp(mean(log(each) for each in found)))
    for degree in degrees:
        sizes = _sizes(model, degree)
        # Adam's time goes with the parameters; seconds per byte differ little between models.
        per_byte = exp(mean(log(_step_per_byte(other, device, degree)) for other in others))
        update = tuple(round(per_byte * each, 9) for each in sizes.parameter_bytes)
        laws = [_Law(others, device, degree, name, largest) for name in PASSES]
        for micro_batch in micro_batches:
            forward, backward = (
                tuple(round(each, 9) for each in law.layers(sizes, model.before, model.after, micro_batch, miss))
                for law, miss in zip(laws, misses, strict=True)
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
        f"{device}: estimated from {' and '.join(other.name for other in others)} there, less the mean miss on "
        f"{reference} ({', '.join(f'{100 * (miss - 1):+.0f} %' for miss in misses)} forward, backward)"
    )
    fields = {name: getattr(model, name) for name in ModelProfile.model_fields}
    source = f"{model.source}; {note}" if model.source else note
    return ModelProfile(**{**fields, "times": (*model.times, *times), "source": source})


class _Law:
    """Seconds of embedding, block and head by their bytes, fitted to what other models take."""

    def __init__(self, others: Sequence[ModelProfile], device: str, degree: int, name: str, largest: int) -> None:
        self.parts = [
            _fit([_points(other, device, degree, name, part, largest) for other in others]) for part in range(3)
        ]

    def layers(self, sizes: LayerSizes, before: int, after: int, micro_batch: int, miss: float) -> list[float]:
        """Seconds per layer; ``miss``: of the blocks."""
        count = len(sizes.parameter_bytes)
        kinds = [0] * before + [1] * (count - before - after) + [2] * after
        return [
            float(self.parts[kind] @ _features(sizes, layer, micro_batch, kind)) / (miss if kind == 1 else 1.0)
            for layer, kind in enumerate(kinds)
        ]


def _features(sizes: LayerSizes, layer: int, micro_batch: int, kind: int) -> NDArray[np.float64]:
    # An embedding looks rows up: it does not touch all of its parameters.
    parameters = 0 if kind == 0 else sizes.parameter_bytes[layer]
    return np.array([1.0, parameters * micro_batch / 1e9, sizes.activation_bytes[layer] * micro_batch / 1e9])


def _points(
    profile: ModelProfile, device: str, degree: int, name: str, kind: int, largest: int
) -> list[tuple[NDArray[np.float64], float]]:
    """Features and seconds of the embedding, the middle block or the head, by micro-batch."""
    sizes = _sizes(profile, degree)
    layer = (0, profile.layers // 2, profile.layers - 1)[kind]
    batches = [batch for batch in profile.micro_batches(device, degree) if batch <= largest]
    seconds = [getattr(profile.times_of(device, degree, batch), name)[layer] for batch in batches]
    # A smaller micro-batch never needs longer: what says so was disturbed.
    seconds = np.minimum.accumulate(seconds[::-1])[::-1].tolist()
    return [
        (_features(sizes, layer, batch, kind), max(each, 1e-9)) for batch, each in zip(batches, seconds, strict=True)
    ]


def _fit(models: Sequence[Sequence[tuple[NDArray[np.float64], float]]]) -> NDArray[np.float64]:
    rows, values = [], []
    for points in models:
        weight = len(points) ** -0.5
        for features, seconds in points:
            rows.append(features / seconds * weight)
            values.append(weight)
    return np.asarray(nnls(np.array(rows), np.array(values))[0])


def _miss(
    model: ModelProfile, others: Sequence[ModelProfile], device: str, degree: int, name: str, largest: int
) -> float:
    """Predicted over measured, of the blocks where they were measured."""
    law = _Law(others, device, degree, name, largest)
    return exp(
        mean(
            log(float(law.parts[1] @ features) / seconds)
            for features, seconds in _points(model, device, degree, name, 1, largest)
        )
    )


def _step_per_byte(profile: ModelProfile, device: str, degree: int) -> float:
    times = profile.times_of(device, degree, profile.micro_batches(device, degree)[0])
    return sum(times.update_seconds) / sum(_sizes(profile, degree).parameter_bytes)


def _sizes(profile: ModelProfile, degree: int) -> LayerSizes:
    return next(sizes for sizes in profile.sizes if sizes.tensor_parallel == degree)


def _common_degrees(profiles: Sequence[ModelProfile], device: str, wanted: Sequence[int]) -> list[int]:
    common = [each for each in wanted if all(each in p.tensor_parallel_degrees(device) for p in profiles)]
    if not common:
        names = ", ".join(profile.name for profile in profiles)
        raise ValueError(f"{names} were timed at no common tensor-parallel degree on {device}")
    return common
