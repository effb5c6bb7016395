"""ZeRO stages 1 and 2 on a CPU."""

from __future__ import annotations

from colossalai.zero.low_level import LowLevelZeroOptimizer

__all__ = ["patch"]


def _check_parameters(optimizer: LowLevelZeroOptimizer) -> None:
    """``_sanity_checks`` that does not require a GPU or NPU, and turns overlapped communication off.

    The constructor calls it after it has stored its arguments and before it uses them. Colossal-AI overlaps
    communication by running reductions on a second stream; a CPU has only one, and ``Tensor.record_stream`` has no CPU
    kernel. This package's plugins overlap in another way, which works on every device (``plugin/overlap``).
    """
    optimizer._overlap_communication = False
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            if parameter.dtype != optimizer._dtype and not getattr(parameter, "skip_zero_check", False):
                raise ValueError(
                    f"ZeRO needs all parameters to have one dtype: the first has {optimizer._dtype}, "
                    f"one of shape {tuple(parameter.shape)} is {parameter.dtype}"
                )


def patch() -> None:
    """Let ZeRO's optimizer, also the hybrid plugin's, be constructed without a GPU."""
    LowLevelZeroOptimizer._sanity_checks = _check_parameters
