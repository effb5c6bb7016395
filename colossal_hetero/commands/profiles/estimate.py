"""``colossal-hetero estimate``: a profile of a GPT's layers from its sizes, without measuring."""

from __future__ import annotations

from pathlib import Path

import click

from ..common import (
    MAX_LAYERS,
    Numbers,
    Whole,
    check_outputs,
    errors_on_one_line,
    micro_batch_option,
    profile_out_option,
    show_profile,
)

__all__ = ["estimate", "write_estimate"]

SIZES = ("layers", "hidden", "heads", "vocabulary")
"""Options that say how large the GPT is. All are required."""


@click.command()
@click.option("--layers", type=Whole(MAX_LAYERS), help="Transformer blocks of the GPT.")
@click.option("--hidden", type=Whole(), help="Hidden size.")
@click.option("--heads", type=Whole(), help="Attention heads per block.")
@click.option("--vocabulary", type=Whole(), help="Tokens in the vocabulary.")
@click.option("--sequence", type=Whole(), default=512, show_default=True, help="Tokens per sample.")
@click.option("--device", "devices", multiple=True, metavar="KIND", help="Kind of GPU, e.g. A100-40; repeatable.")
@micro_batch_option
@click.option(
    "--tp", "tensor_parallel", type=Numbers(), default="1", show_default=True, help="Tensor-parallel degrees."
)
@click.option(
    "--efficiency", type=float, default=0.4, show_default=True, help="Share of the nominal FLOP/s that is reached."
)
@profile_out_option
def estimate(
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    vocabulary: int | None,
    sequence: int,
    devices: tuple[str, ...],
    micro_batches: tuple[int, ...],
    tensor_parallel: tuple[int, ...],
    efficiency: float,
    out: Path,
) -> None:
    """Estimate how long a GPT's layers take on kinds of GPU, from its sizes and the GPUs' nominal FLOP/s.

    For planning before there are machines; `colossal-hetero profile` measures instead.
    """
    with errors_on_one_line():
        check_outputs(out)
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary}
        write_estimate(sizes, sequence, devices, micro_batches, tensor_parallel, efficiency, out)


def write_estimate(
    sizes: dict[str, int | None],
    sequence: int,
    devices: tuple[str, ...],
    micro_batches: tuple[int, ...],
    tensor_parallel: tuple[int, ...],
    efficiency: float,
    out: Path,
) -> None:
    """Write and print an estimated profile.

    Args:
        sizes: of the GPT, by the names in :data:`SIZES`; None if an option was not given.
        sequence: tokens per sample.
        devices: kinds of GPU in the catalog.
        micro_batches: sizes in samples.
        tensor_parallel: degrees.
        efficiency: the share of the nominal FLOP/s that is reached.
        out: the file to write.

    Raises:
        ValueError: A size is missing, or a kind of device is unknown.
    """
    from difflib import get_close_matches

    from ...planner.cluster.gpu_catalog import GPUS
    from ...planner.profile.estimate import estimated_profile
    from ...planner.profile.gpt import Transformer
    from ...planner.profile.layer_profile import save_model_profile

    given = {name: size for name, size in sizes.items() if size is not None}
    missing = [f"--{name}" for name in SIZES if name not in given]
    if missing:
        wanted = ", ".join(f"--{name}" for name in SIZES)
        raise ValueError(
            f"to estimate a GPT, give {wanted}, --sequence and --device; {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} missing"
        )
    for name in devices:
        if name not in GPUS:
            close = get_close_matches(name, GPUS, n=1)
            raise ValueError(
                f"--device {name} is not known; valid: {', '.join(GPUS)}"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    result = estimated_profile(
        Transformer(sequence=sequence, **given),
        [GPUS[name] for name in devices],
        efficiency=efficiency,
        micro_batches=micro_batches,
        tensor_parallel=tensor_parallel,
    )
    save_model_profile(result, out)
    show_profile(result, out)
