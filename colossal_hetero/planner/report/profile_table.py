"""A layer profile as a table."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ..profile.layer_profile import LayerTimes, ModelProfile

__all__ = ["render_profile"]


def render_profile(profile: ModelProfile) -> Group:
    """Times by kind of device: blocks, layers before and after them, a pipeline's schedule; below, memory per block."""
    table = Table(title=f"{profile.name}, {profile.precision}: forward plus backward pass, and optimizer step")
    table.add_column("\ndevice")
    counts = ("\nranks", "\ntp", "micro-batch\n[samples]")
    milliseconds = (
        "before blocks\n[ms]",
        "per block\n[ms]",
        "after blocks\n[ms]",
        "all, per sample\n[ms]",
        "update\n[ms]",
        "schedule, per cut\n[ms]",
    )
    for name in counts + milliseconds:
        # In a plain string rich would read the brackets as markup.
        table.add_column(Text(name), justify="right")
    for times in profile.times:
        table.add_row(*_row(profile, times), end_section=times is _last_of(profile, times.device))
    return Group(table, Text(_memory(profile)))


def _row(profile: ModelProfile, times: LayerTimes) -> list[str]:
    seconds = [
        forward + backward for forward, backward in zip(times.forward_seconds, times.backward_seconds, strict=True)
    ]
    stop = len(seconds) - profile.after
    blocks = seconds[profile.before : stop]
    return [
        times.device,
        _ranks(profile, times.device),
        str(times.tensor_parallel),
        str(times.micro_batch),
        _milliseconds(sum(seconds[: profile.before])),
        _span(blocks),
        _milliseconds(sum(seconds[stop:])),
        _milliseconds(sum(seconds) / times.micro_batch),
        _milliseconds(sum(times.update_seconds)),
        _milliseconds(times.schedule_seconds),
    ]


def _ranks(profile: ModelProfile, device: str) -> str:
    ranks = [str(rank) for rank, each in enumerate(profile.rank_devices) if each == device]
    if len(ranks) > 6:
        return f"{', '.join(ranks[:4])}, … ({len(ranks)})"
    return ", ".join(ranks) or "–"


def _span(values: list[float]) -> str:
    low, high = _milliseconds(min(values)), _milliseconds(max(values))
    return low if low == high else f"{low} – {high}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:,.0f}"


def _last_of(profile: ModelProfile, device: str) -> LayerTimes:
    return [times for times in profile.times if times.device == device][-1]


def _memory(profile: ModelProfile) -> str:
    lines = []
    for sizes in profile.sizes:
        block = profile.before
        degree = f" at tensor_parallel {sizes.tensor_parallel}" if len(profile.sizes) > 1 else ""
        state = sum(sizes.parameter_bytes) * profile.state_factor
        lines.append(
            f"{profile.blocks} blocks{degree}; {_bytes(state)} of parameters, gradients and optimizer state; per "
            f"sample, a block keeps {_bytes(sizes.activation_bytes[block])} for the backward pass and sends "
            f"{_bytes(sizes.output_bytes[block])} to the next block"
        )
    return "\n".join(lines)


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
