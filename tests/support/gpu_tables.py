"""Small tables in the format of the published ones, and where the published ones are."""

from __future__ import annotations

from pathlib import Path

from .paths import REPOSITORY

REAL_TABLES = REPOSITORY.parent / "shared" / "data" / "gpu-profiles"
"""The published tables; tests that need them are skipped where they are missing."""
LAYERS = 5
PARAMETERS = (700, 100, 100, 100, 500)
STEP_SECONDS = 0.028


def write_tables(folder: Path) -> None:
    """Tables of the model "tiny": 5 layers on "GH-96" at degrees 1 and 2; on "V100-16" one layer less."""
    times = ["model,gpu,tensor_parallel,micro_batch,layer,forward_seconds,backward_seconds,update_seconds"]
    for gpu, count in (("GH-96", LAYERS), ("V100-16", LAYERS - 1)):
        for degree in (1, 2):
            for batch in (1, 2):
                for layer in reversed(range(count)):
                    seconds = 0.01 * batch / degree
                    times.append(f"tiny,{gpu},{degree},{batch},{layer},{seconds},{2 * seconds},{STEP_SECONDS / degree}")
    sizes = ["model,tensor_parallel,layer,parameter_bytes,input_bytes,output_bytes,activation_bytes"]
    sizes += [
        f"tiny,{n},{layer},{PARAMETERS[layer] // n},8,4000000,{30 // n}" for n in (1, 2) for layer in range(LAYERS)
    ]
    rates = ["gpu,where,gpus,a,b,c,max_bytes_per_second"]
    rates += [f"GH-96,between nodes,{n},0,{n},{2 * n},{10e9 * n}" for n in (1, 2)]
    rates += [f"GH-96,inside a node,{n},0,0,100,{100e9}" for n in (2, 4)]
    write_lines(folder / "layer_times.csv", times)
    write_lines(folder / "layer_memory.csv", sizes)
    write_lines(folder / "bandwidth.csv", rates)


def write_lines(path: Path, lines: list[str]) -> None:
    """Write a table."""
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def change(path: Path, old: str, new: str) -> None:
    """Replace a text of a file that has it."""
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
