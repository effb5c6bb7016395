"""Find the smallest micro-batch that a model runs in training.

Batch normalization of inputs ``[N, C]`` needs two values per channel, so a model with such a layer cannot train with a
single sample.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["is_too_few_samples", "smallest_batch"]

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
    """The first of 1, 2, 4, … samples with which ``run`` does not fail for lack of samples.

    Args:
        run: runs forward, loss and backward of a micro-batch of that many samples.
        cap: largest micro-batch that may be used, in samples.
        abort: called after a run with too few samples; it must make the model ready for the next run.

    Raises:
        ValueError: more than ``cap`` samples are needed.
        Exception: any other error of ``run``.
    """
    samples = 1
    while True:
        try:
            run(samples)
            return samples
        except Exception as error:
            if not is_too_few_samples(error):
                raise
            if 2 * samples > cap:
                raise ValueError(
                    f"the model cannot train with micro-batches of {cap}: a batch normalization needs more than one "
                    f"value per channel. Allow micro-batches of at least {2 * samples} samples (max_micro_batch, "
                    "global_batch_size), or use a normalization that needs no batch, such as GroupNorm or LayerNorm"
                ) from error
        abort()
        samples *= 2
