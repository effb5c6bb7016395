"""``colossal-hetero profile`` measures how long a model's layers take on the devices of this machine; ``estimate``
computes such a profile of a GPT from its sizes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..common.launch import is_rank, local_devices, start_ranks
from . import common

if TYPE_CHECKING:
    from ..planner.cluster.topology import DeviceKind
    from ..planner.profile.layer_profile import ModelProfile
    from ..profiling.named_profile import ProfileRequest


def _settings(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    settings = {}
    for value in values:
        key, equals, text = value.partition("=")
        if not key or not equals:
            raise click.BadParameter(f"{value!r} is not KEY=VALUE, such as depth=6", context, parameter)
        try:
            settings[key] = json.loads(text)
        except json.JSONDecodeError:
            settings[key] = text
    return settings


@click.command()
@click.option(
    "--model",
    required=True,
    help="timm:NAME (e.g. timm:vit_tiny_patch16_224), hf:gpt2, hf:FOLDER (with config.json), vit-1b, or vit-3b.",
)
@click.option(
    "--set",
    "options",
    multiple=True,
    metavar="KEY=VALUE",
    callback=_settings,
    help="An option of the model, e.g. depth=6; repeatable.",
)
@click.option("--image-size", type=click.IntRange(min=1), help="Pixels; default: the model's own.")
@click.option(
    "--sequence",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Tokens per sample of a language model.",
)
@common.micro_batch_option
@common.choice_option("--optimizer", "adam", "adamw", "sgd", help="Optimizer whose step is measured.")
@common.choice_option("--precision", "fp32", "fp16", "bf16", help="Precision in which the layers are measured.")
@common.amount_option(
    "--seconds", "SECONDS", "Measure each micro-batch for at least this long.", default=3.0, show_default=True
)
@click.option(
    "--tp",
    "tensor_parallel",
    type=common.Numbers(),
    default="1",
    show_default=True,
    help="Tensor-parallel degrees to measure, e.g. 1,2.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Ranks to start on this machine; default: one per GPU, or on the CPU as many as the largest --tp.",
)
@common.profile_out_option
def profile(model: str, out: Path, nproc: int | None, tensor_parallel: tuple[int, ...], **given: Any) -> None:
    """Measure how long a model's layers take on the devices of this machine.

    `colossal-hetero estimate` computes such a profile from the sizes of a GPT instead. For several machines, run this
    command on each of them under a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli.main profile --model ...
    """
    with common.errors_on_one_line():
        common.check_outputs(out)
        from ..profiling.named_profile import ProfileRequest, check_request

        seconds = given.pop("seconds")
        request = ProfileRequest(model=model, out=out, tensor_parallel=tensor_parallel, min_seconds=seconds, **given)
        if is_rank():
            if nproc is not None:
                raise ValueError("--nproc starts ranks, but a launcher has started them already; leave it out")
            profile_as_rank(request)
            return
        ranks = nproc or local_devices(ranks_on_cpu=max(tensor_parallel))
        check_request(request, ranks)
        start_ranks(ranks, profile_as_rank, request)


def profile_as_rank(request: ProfileRequest) -> None:
    from ..profiling.named_profile import profile_named_model

    measured = profile_named_model(request, common.make_console())
    if os.environ["RANK"] == "0":
        _show(measured.profile, request.out)


def _show(result: ModelProfile, out: Path) -> None:
    from ..planner.report.plan_table import render_profile

    console = common.make_console()
    console.print(render_profile(result))
    console.print(f"{out}: layers of {result.name}, {result.source}")


@click.command()
@click.option(
    "--layers", type=click.IntRange(1, common.MAX_LAYERS), required=True, help="Transformer blocks of the GPT."
)
@click.option("--hidden", type=common.COUNT, required=True, help="Hidden size.")
@click.option("--heads", type=common.COUNT, required=True, help="Attention heads per block.")
@click.option("--vocabulary", type=common.COUNT, required=True, help="Tokens in the vocabulary.")
@click.option("--sequence", type=common.COUNT, default=512, show_default=True, help="Tokens per sample.")
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
@common.micro_batch_option
@click.option(
    "--tp", "tensor_parallel", type=common.Numbers(), default="1", show_default=True, help="Tensor-parallel degrees."
)
@click.option(
    "--efficiency",
    "efficiencies",
    multiple=True,
    metavar="[KIND=]SHARE",
    help="Share of the nominal FLOP/s that is reached, of all kinds or of one; repeatable.  [default: 0.4]",
)
@common.profile_out_option
def estimate(
    devices: tuple[str, ...],
    cluster: Path | None,
    micro_batches: tuple[int, ...],
    tensor_parallel: tuple[int, ...],
    efficiencies: tuple[str, ...],
    out: Path,
    **sizes: int,
) -> None:
    """Estimate how long a GPT's layers take on kinds of GPU, from its sizes and the GPUs' nominal FLOP/s.

    For planning before there are machines; `colossal-hetero profile` measures instead.
    """
    from ..planner.profile.estimate import Transformer, estimated_profile
    from ..planner.profile.layer_profile import save_profile

    with common.errors_on_one_line():
        common.check_outputs(out)
        kinds = _kinds(devices, cluster)
        gpt, share = Transformer(**sizes), _efficiencies(efficiencies, [kind.name for kind in kinds])
        result = estimated_profile(
            gpt, kinds, efficiency=share, micro_batches=micro_batches, tensor_parallel=tensor_parallel
        )
        save_profile(result, out)
    _show(result, out)
    for kind, given_as in zip(kinds, devices or [kind.name for kind in kinds], strict=True):
        if "=" in given_as:
            memory = f"{kind.memory_bytes / 1e9:g}" if "," in given_as else "…"
            text = f"in the cluster file: [kinds.{kind.name}] memory_gb = {memory}, tflops = {kind.flops / 1e12:g}"
            common.make_console().print(text, markup=False, highlight=False)


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
