"""Profiles in the files of Sailor's own repository (github.com/eth-easl/sailor, MIT).

``sailor_planner/profiles/MODEL/GPU/profile.json`` has, by size of micro-batch, tensor-parallel degree and layer, the
seconds of forward, backward and update. ``llm_info.json`` has, by model, degree and layer, the bytes of parameters, of
what is sent to the next layer and of what is kept for backward, for one sample. How they are read is said in
:mod:`~colossal_hetero.planner.published.sailor_tables`, whose tables hold the same numbers.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...io.json_files import read_json
from ..published.sailor_tables import MAX_DIGITS, GpuTables, read_gpu_tables, tables_of_rows

__all__ = ["read_sailor", "read_sailor_repository"]

BYTES = {"parameter_bytes": "params_bytes", "activation_bytes": "act_mem_bytes", "output_bytes": "act_output_bytes"}
"""Our names of sizes, and the names in ``llm_info.json``."""


def read_sailor(folder: Path | str, model: str) -> GpuTables:
    """The profile of ``model`` from the repository, or from tables if the folder has them; errors as of these."""
    tables = (Path(folder) / "layer_times.csv").exists()
    return read_gpu_tables(folder, model) if tables else read_sailor_repository(folder, model)


def read_sailor_repository(folder: Path | str, model: str) -> GpuTables:
    """The profile of ``model``, and notes on what was not used.

    Args:
        folder: The repository, or a folder in it or copied from it that has ``llm_info.json`` and
            ``profiles/MODEL/GPU/profile.json`` somewhere below.
        model: Name of the model there, e.g. ``OPT-350``.

    Raises:
        ValueError: A file is missing or has other contents; the message says which.
    """
    folder = Path(folder)
    memory = next(iter(sorted(folder.rglob("llm_info.json"))), None)
    name = glob.escape(model)
    timed = sorted(folder.rglob(f"sailor_planner/profiles/{name}/*/profile.json")) or sorted(
        folder.rglob(f"profiles/{name}/*/profile.json")
    )
    if memory is None:
        raise ValueError(
            f"{folder} has no llm_info.json, which has the sizes of layers; in Sailor's repository it is in "
            "sailor/Planner"
        )
    if not timed:
        found = sorted({path.parent.parent.name for path in folder.rglob("profiles/*/*/profile.json")})
        raise ValueError(
            f"{folder} has no profiles/{model}/GPU/profile.json, which has the times; it has those of "
            f"{', '.join(found) or 'no model'}"
        )
    models = _content(memory)
    if model not in models:
        raise ValueError(f"{memory} has no model {model!r}, only {', '.join(sorted(models)) or 'none'}")
    sizes = _entries(memory, models[model], 2)
    size_rows = [
        {"model": model, "tensor_parallel": degree, "layer": layer, "": f"{memory}, layer {layer}"}
        | {name: _field(memory, values, theirs) for name, theirs in BYTES.items()}
        for (degree, layer), values in sizes
    ]
    time_rows = []
    for path in timed:
        for (size, degree, layer), seconds in _entries(path, _content(path), 3):
            if not isinstance(seconds, list) or len(seconds) != 3:
                raise ValueError(
                    f"{path}: layer {layer} has {seconds!r}; needed are seconds of forward, backward, update"
                )
            row = {"model": model, "gpu": path.parent.name, "micro_batch": size, "tensor_parallel": degree}
            row |= {"layer": layer, "": f"{path}, layer {layer}"}
            names = ("forward_seconds", "backward_seconds", "update_seconds")
            time_rows.append(row | dict(zip(names, map(str, seconds), strict=True)))
    return tables_of_rows(model, size_rows, time_rows, memory, timed[0])


def _content(path: Path) -> Mapping[str, Any]:
    _, content = read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not an object by name")
    return content


def _entries(path: Path, content: Any, depth: int) -> list[tuple[tuple[str, ...], Any]]:
    """The values that are nested so deeply, with the whole numbers that lead to them."""
    found: list[tuple[tuple[str, ...], Any]] = [((), content)]
    for _ in range(depth):
        deeper = []
        for names, value in found:
            if not isinstance(value, dict) or not all(name.isdecimal() and len(name) <= MAX_DIGITS for name in value):
                where = " → ".join(names) or "the model"
                raise ValueError(f"{path}: {where} should have entries by number (micro-batch, degree or layer)")
            deeper += [((*names, name), each) for name, each in value.items()]
        found = deeper
    return found


def _field(path: Path, values: Any, name: str) -> str:
    if not isinstance(values, dict) or name not in values:
        raise ValueError(f"{path}: a layer has no {name}")
    return str(values[name])
