"""A copy of a checkout of Sailor's repository whose files have our numbers, so that all planners see the same inputs.

The planners in Sailor's repository read layer times, bandwidths and memory sizes from files beside their code, and some
lack a kind of GPU. The copy differs from the checkout in data only, with two exceptions that are named here:

- Layer times: only micro-batches that our own search may choose. Rows that are missing or belong to another model
  (GPT-Neo-2.7 on GH-96 and A100-80) are written from our profile. Sailor's planner and simulator read a degree that was
  not timed as 0 s, so such rows get ``NOT_TIMED`` seconds per layer.
- Bandwidths between nodes: from our table. Between different kinds of GPU it is that of the slower kind, for the
  smaller number of GPUs that send at once.
- FlashFlex's file of devices has 1,513 and 250 TFLOP/s for RTX GPUs beside single-precision numbers for the others;
  they are replaced by single-precision numbers.
- Code: Sailor's planner knows the memory of three kinds of GPU only. Rows for the others are added to its table.
- Code: its library is built for the Python that runs it; the build files name Python 3.10.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planner.sailor_tables import BLOCKS_TIMED, GpuChannels
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile

__all__ = ["ZONE", "bandwidth_rows", "prepare_copy", "sailor_times"]

ZONE = "us-central1-a"
"""A zone in Sailor's files; all nodes are in one."""
NOT_TIMED = 1000.0
MEMORY_GIB = {"A100-80": 80, "RTX-2080": 11, "RTX-3090": 24, "Titan-RTX": 24}
"""As in Sailor's simulator (``simulations/constants.py``)."""
SINGLE_PRECISION_TFLOPS = {"RTX-2080": 13.4, "RTX-3090": 35.6, "Titan-RTX": 16.3}
"""From NVIDIA's Turing and Ampere GA102 whitepapers."""
LEFT_OUT = ("Aceso", "validation", "clariden", "__pycache__", "*.o", "*.so", "*.bin", "*.pdf")

Times = dict[str, dict[str, dict[str, list[float]]]]
"""Forward, backward and update seconds by micro-batch, degree and layer, as Sailor writes them."""


def prepare_copy(
    checkout: Path,
    folder: Path,
    profiles: Iterable[ModelProfile],
    channels: Mapping[str, GpuChannels],
    micro_batches: Sequence[int],
) -> Path:
    """Copies what planners need to ``folder/sailor`` and writes our numbers there. Returns that path."""
    copy = folder / "sailor"
    if copy.exists():
        shutil.rmtree(copy)
    ignore = shutil.ignore_patterns(*LEFT_OUT)
    for part in ("Planner", "providers", "profiling"):
        shutil.copytree(checkout / "sailor" / part, copy / "sailor" / part, ignore=ignore)
    planner = copy / "sailor" / "Planner"
    _write(copy / "sailor" / "providers" / "multizone_bandwidths_het.json", bandwidth_rows(channels))
    for profile in profiles:
        for kind in profile.devices:
            _write_times(planner, profile, kind, micro_batches, channels[kind].between)
    _edit_flashflex(planner / "baselines" / "FlashFlex" / "src" / "machine_amounts.json")
    source = planner / "sailor_planner" / "cpp_src" / "planner_utils.cpp"
    source.write_text(_with_memory(source.read_text(encoding="utf-8")), encoding="utf-8")
    return copy


def bandwidth_rows(channels: Mapping[str, GpuChannels]) -> dict[str, Any]:
    """Bandwidths between nodes as Sailor's file has them: zone, kind, number of GPUs; of the sender, then of the
    receiver; then the coefficients of the curve and the largest bandwidth in bytes/s."""
    ends = [(kind, number) for kind, each in channels.items() for number in each.between]
    rows: dict[str, Any] = {}
    for kind, number in ends:
        for other, other_number in ends:
            fewer = min(number, other_number)
            choices = [channels[each].between for each in (kind, other)]
            slower = min(
                (each[max(n for n in each if n <= fewer)] for each in choices), key=lambda each: each.bytes_per_second
            )
            row = [list(slower.curve or ()), slower.bytes_per_second]
            place = rows.setdefault(kind, {}).setdefault(str(number), {}).setdefault(ZONE, {})
            place.setdefault(other, {})[str(other_number)] = row
    return {ZONE: rows}


def sailor_times(profile: ModelProfile, kind: str, micro_batches: Sequence[int], degrees: Iterable[int]) -> Times:
    """Our layer times of one kind of GPU as Sailor writes them; of these degrees, those that were not timed have
    ``NOT_TIMED``.

    The update is that of the model whose step was timed: an embedding, two blocks and a head.
    """
    found = {(each.micro_batch, each.tensor_parallel): each for each in profile.times if each.device == kind}
    times: Times = {}
    for size in micro_batches:
        by_degree = times.setdefault(str(size), {})
        for degree in sorted(degrees):
            each = found.get((size, degree))
            by_degree[str(degree)] = {
                str(layer): [NOT_TIMED, NOT_TIMED, 0.0] if each is None else _layer(each, layer, profile)
                for layer in range(profile.layers)
            }
    return times


def _layer(times: LayerTimes, layer: int, profile: ModelProfile) -> list[float]:
    update = times.update_seconds
    step = sum(update[: profile.before + BLOCKS_TIMED]) + sum(update[profile.layers - profile.after :])
    return [times.forward_seconds[layer], times.backward_seconds[layer], step]


def _write_times(
    planner: Path, profile: ModelProfile, kind: str, micro_batches: Sequence[int], degrees: Collection[int]
) -> None:
    _write(
        planner / "sailor_planner" / "profiles" / profile.name / kind / "profile.json",
        sailor_times(profile, kind, micro_batches, degrees),
    )
    ours = {(each.micro_batch, each.tensor_parallel): each for each in profile.times if each.device == kind}
    amp = planner / "baselines" / "AMP" / "profiles" / profile.name / kind
    metis = planner / "baselines" / "Metis" / "profiles" / profile.name
    for path in (metis / kind).glob("*.json"):
        path.unlink()
    for (size, degree), each in ours.items():
        if degree > max(degrees):
            # Timed on other machines; the nodes here are smaller, and some planners take all degrees that they find.
            continue
        if size == 1:
            amp.mkdir(parents=True, exist_ok=True)
            np.save(amp / f"profile_{degree}.npy", np.array(each.forward_seconds))
        if size in micro_batches:
            passes = [1e3 * (a + b) for a, b in zip(each.forward_seconds, each.backward_seconds, strict=True)]
            _write_metis(metis / kind / f"mbs{size}_tmp{degree}.json", passes, 1e3 * sum(each.update_seconds))
    for degree in set(degrees) - {degree for _, degree in ours}:
        # Metis ends with an error if kinds were timed at different degrees.
        for size in micro_batches:
            _write_metis(metis / kind / f"mbs{size}_tmp{degree}.json", [1e3 * NOT_TIMED] * profile.layers, 0.0)


def _write_metis(path: Path, passes: Sequence[float], update: float) -> None:
    """A file of Metis' profile: these milliseconds of the layers' passes and of the update, and the memory of the same
    micro-batch and degree on another kind of GPU, which is the same on all."""
    same = sorted(path.parent.parent.glob(f"*/{path.name}"))
    sample = next((each for each in same if each.parent != path.parent), None)
    if sample is None:
        return
    content = json.loads(sample.read_text(encoding="utf-8"))
    content["execution_time"] = {
        "total_time_ms": sum(passes) + update,
        "forward_backward_time_ms": sum(passes),
        "batch_generator_time_ms": 0.0,
        "optimizer_time_ms": update,
        "layer_compute_total_ms": list(passes),
    }
    _write(path, content)


def _edit_flashflex(path: Path) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    for kind, teraflops in SINGLE_PRECISION_TFLOPS.items():
        content["machine_specs"][kind][0] = teraflops
    content["machine_amounts"] = {kind: {"1": 0} for kind in content["machine_specs"]}
    _write(path, content)


def _with_memory(source: str) -> str:
    """The C++ source with all kinds of GPU in its table of memory sizes."""
    rows = "".join(f'    {{"{kind}", {size}}},\n' for kind, size in MEMORY_GIB.items() if f'{{"{kind}"' not in source)
    changed, number = re.subn(r"(GPU_MEMORY = \{\n)", lambda match: match[1] + rows, source, count=1)
    if not number:
        raise ValueError("planner_utils.cpp has no table GPU_MEMORY; is it another commit of Sailor's repository?")
    return changed


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
