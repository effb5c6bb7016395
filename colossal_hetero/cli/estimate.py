"""``colossal-hetero estimate``: a profile of a GPT's layers from its sizes, without measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .common import (
    MAX_LAYERS,
    Numbers,
    Whole,
    check_outputs,
    errors_on_one_line,
    make_console,
    micro_batch_option,
    profile_out_option,
    show_profile,
)

if TYPE_CHECKING:
    from ..planner.cluster.topology import DeviceKind

SIZES = ("layers", "hidden", "heads", "vocabulary")


@click.command()
@click.option("--layers", type=Whole(MAX_LAYERS), help="Transformer blocks of the GPT.")
@click.option("--hidden", type=Whole(), help="Hidden size.")
@click.option("--heads", type=Whole(), help="Attention heads per block.")
@click.option("--vocabulary", type=Whole(), help="Tokens in the vocabulary.")
@click.option("--sequence", type=Whole(), default=512, show_default=True, help="Tokens per sample.")
@click.option(
    "--device",
    "devices",
    multiple=True,
    metavar="KIND[=TFLOPS[,GB]]",
    help="Kind of GPU, e.g. A100-40; one that is not known with its dense half-precision TFLOP/s and its memory, e.g. "
    "W7900=122,48. Repeatable.",
)
@click.option(
    "--cluster",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Cluster file: its kinds of device are known too, and are those estimated for if there is no --device.",
)
@micro_batch_option
@click.option(
    "--tp", "tensor_parallel", type=Numbers(), default="1", show_default=True, help="Tensor-parallel degrees."
)
@click.option(
    "--efficiency",
    "efficiencies",
    multiple=True,
    metavar="[KIND=]SHARE",
    help="Share of the nominal FLOP/s that is reached, of all kinds or of one; repeatable.  [default: 0.4]",
)
@profile_out_option
def estimate(
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    vocabulary: int | None,
    sequence: int,
    devices: tuple[str, ...],
    cluster: Path | None,
    micro_batches: tuple[int, ...],
    tensor_parallel: tuple[int, ...],
    efficiencies: tuple[str, ...],
    out: Path,
) -> None:
    """Estimate how long a GPT's layers take on kinds of GPU, from its sizes and the GPUs' nominal FLOP/s.

    For planning before there are machines; `colossal-hetero profile` measures instead.
    """
    from ..planner.profile.estimate import Transformer, estimated_profile
    from ..planner.profile.layer_profile import save_profile

    with errors_on_one_line():
        check_outputs(out)
        sizes = {name: size for name, size in zip(SIZES, (layers, hidden, heads, vocabulary), strict=True) if size}
        missing = [f"--{name}" for name in SIZES if name not in sizes]
        if missing:
            wanted = ", ".join(f"--{name}" for name in SIZES)
            raise ValueError(
                f"to estimate a GPT, give {wanted}, --sequence and --device; {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing"
            )
        kinds = _kinds(devices, cluster)
        gpt, share = Transformer(sequence=sequence, **sizes), _efficiencies(efficiencies, [kind.name for kind in kinds])
        result = estimated_profile(
            gpt, kinds, efficiency=share, micro_batches=micro_batches, tensor_parallel=tensor_parallel
        )
        save_profile(result, out)
    show_profile(result, out)
    for kind, given_as in zip(kinds, devices or [kind.name for kind in kinds], strict=True):
        if "=" in given_as:
            memory = f"{kind.memory_bytes / 1e9:g}" if "," in given_as else "…"
            text = f"in the cluster file: [kinds.{kind.name}] memory_gb = {memory}, tflops = {kind.flops / 1e12:g}"
            make_console().print(text, markup=False, highlight=False)


def _kinds(devices: tuple[str, ...], cluster: Path | None) -> list[DeviceKind]:
    from difflib import get_close_matches

    from ..planner.cluster.cluster_file import load_cluster
    from ..planner.cluster.gpu_catalog import GPUS
    from ..planner.cluster.topology import DeviceKind

    own = {} if cluster is None else {each.kind.name: each.kind for each in load_cluster(cluster).devices}
    known = GPUS | own
    found = []
    for device in devices or own:
        name, equals, numbers = device.partition("=")
        if equals:
            teraflops, comma, gigabytes = numbers.partition(",")
            wanted = f"--device {device}", "TFLOP/s and gigabytes, e.g. W7900=122,48"
            speed, memory = _positive(teraflops, *wanted), _positive(gigabytes, *wanted) if comma else 1.0
            found.append(DeviceKind(name, round(memory * 1e9), speed * 1e12))
        elif name in known:
            found.append(known[name])
        else:
            close = get_close_matches(name, known, n=1)
            raise ValueError(
                f"--device {name} is not known; valid: {', '.join(known)}, or {name}=TFLOPS"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    return found


def _efficiencies(given: tuple[str, ...], devices: list[str]) -> dict[str, float]:
    """The share by kind; one that is given without a kind holds for all others."""
    shares: dict[str, float] = {}
    for each in sorted(given, key=lambda each: "=" in each):  # those of one kind last
        name, equals, share = each.rpartition("=")
        value = _positive(share, f"--efficiency {each}", "a share of the nominal FLOP/s, e.g. 0.4 or A100-40=0.4")
        shares |= {name: value} if equals else dict.fromkeys(devices, value)
    return shares


def _positive(text: str, option: str, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{option}: {text!r} is no number above 0; give {wanted}")
    return value
