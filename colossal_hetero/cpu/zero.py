"""ZeRO stages 1 and 2 on a CPU."""

from __future__ import annotations

from colossalai.zero.low_level import LowLevelZeroOptimizer

__all__ = ["patch"]


def _check_parameters(optimizer: LowLevelZeroOptimizer) -> None:
    """``_sanity_checks`` without its demand for a GPU or an NPU, and without communication beside the computation.

    The constructor calls it when it has stored its arguments and before it acts on them. Colossal-AI overlaps by
    running reductions on a second stream; a CPU has one, and ``Tensor.record_stream`` has no CPU kernel.
    """
    optimizer._overlap_communication = False
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            if parameter.dtype != optimizer._dtype and not getattr(parameter, "skip_zero_check", False):
                raise ValueError(
                    f"ZeRO needs all parameters in one dtype: the first is {optimizer._dtype}, "
                    f"one of shape {tuple(parameter.shape)} is {parameter.dtype}"
                )


def patch() -> None:
    """Let ZeRO's optimizer, the hybrid plugin's included, be built without a GPU."""
    LowLevelZeroOptimizer._sanity_checks = _check_parameters
