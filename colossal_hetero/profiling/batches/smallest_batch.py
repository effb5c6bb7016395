"""Find the smallest micro-batch that a model runs in training.

Batch normalization of inputs ``[N, C]`` needs two values per channel, so a model with such a layer cannot train with a
single sample. Other training steps need pairs or triplets.
"""

from __future__ import annotations

from collections.abc import Callable

from ..memory import is_out_of_memory

__all__ = ["is_too_few_samples", "smallest_batch"]

SMALL = 4
"""Every number of samples up to this is tried."""

_MESSAGE = "Expected more than 1 value per channel"
"""Begin of the message of the ``ValueError`` that torch raises in ``batch_norm``."""


def is_too_few_samples(error: BaseException | None) -> bool:
    """Whether ``error``, or an error that caused it, says that a batch normalization had a single value per channel."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ValueError) and _MESSAGE in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def smallest_batch(run: Callable[[int], object], cap: int, abort: Callable[[], None]) -> int:
    """The first of 1, 2, 3, 4, 8, 16, … samples with which ``run`` does not fail.

    More than four are tried only if a batch normalization asks for them.

    Args:
        run: runs forward, loss and backward of a micro-batch of that many samples.
        cap: largest micro-batch that may be used, in samples.
        abort: called after a run that failed; it must make the model ready for the next run.

    Raises:
        ValueError: more than ``cap`` samples are needed.
        Exception: the error of ``run`` with one sample, if it is another one.
    """
    samples, first = 1, None
    while True:
        try:
            run(samples)
            return samples
        except Exception as error:
            first = first or error
            following = samples + 1 if samples < SMALL else 2 * samples
            is_normalization = is_too_few_samples(error)
            if is_out_of_memory(error) or not (is_normalization or samples < SMALL) or following > cap:
                if not (is_normalization and following > cap):
                    raise first from None
                raise ValueError(
                    f"the model cannot train with micro-batches of {cap}: a batch normalization needs more than one "
                    f"value per channel. Allow micro-batches of at least {following} samples (max_micro_batch, "
                    "global_batch_size), or use a normalization that needs no batch, such as GroupNorm or LayerNorm"
                ) from error
        abort()
        samples = following
