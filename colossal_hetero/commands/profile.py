"""``colossal-hetero profile``: measure a model's layers on these devices, or estimate them from sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .common import check_outputs, errors_on_one_line, make_console

if TYPE_CHECKING:
    from ..planner.profile.layer_profile import ModelProfile

__all__ = ["profile"]

SIZES = ("layers", "hidden", "heads", "vocabulary")


def _numbers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of numbers, such as 1,2,4,8", context, parameter) from None
    if min(numbers) < 1:
        raise click.BadParameter(f"{value!r}: {min(numbers)} is below 1", context, parameter)
    return numbers


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
@click.option("--model", help="To be measured: timm:vit_tiny_patch16_224, hf:gpt2, hf:FOLDER (with config.json).")
@click.option(
    "--set", "options", multiple=True, metavar="KEY=VALUE", callback=_settings, help="Of the model, e.g. depth=6."
)
@click.option("--image-size", type=click.IntRange(min=1), help="Pixels; default: the model's own.")
@click.option(
    "--sequence", type=click.IntRange(min=1), default=512, show_default=True, help="Tokens per sample of a text."
)
@click.option(
    "--micro-batch",
    "micro_batches",
    default="1,2,4,8",
    show_default=True,
    callback=_numbers,
    help="Sizes, in samples. Plans may use all from the first to the last.",
)
@click.option(
    "--optimizer", type=click.Choice(["adam", "adamw", "sgd"]), default="adam", show_default=True, help="To measure."
)
@click.option(
    "--precision", type=click.Choice(["fp32", "fp16", "bf16"]), default="fp32", show_default=True, help="To measure in."
)
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=3.0, show_default=True, help="At least, for each micro-batch."
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Start that many ranks on this machine; default: one per GPU, or one on the CPU.",
)
@click.option("--layers", type=click.IntRange(min=1), help="Estimate a GPT with so many blocks instead.")
@click.option("--hidden", type=click.IntRange(min=1), help="Its hidden size.")
@click.option("--heads", type=click.IntRange(min=1), help="Its attention heads.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Its words.")
@click.option(
    "--device", "devices", multiple=True, metavar="KIND", help="Kind of GPU to estimate for, e.g. A100-40; repeatable."
)
@click.option(
    "--tp", "tensor_parallel", default="1", show_default=True, callback=_numbers, help="Degrees to estimate for."
)
@click.option(
    "--efficiency", type=float, default=0.4, show_default=True, help="Share of nominal FLOP/s to estimate with."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("profile.json"),
    show_default=True,
    help="The file to write.",
)
@click.pass_context
def profile(context: click.Context, model: str | None, out: Path, nproc: int | None, **given: Any) -> None:
    """Measure how long a model's layers take on the devices of this machine, or estimate it from a GPT's sizes.

    For several machines, run it on each of them under a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli profile --model ...
    """
    with errors_on_one_line():
        check_outputs(out)
        sizes = {name: given.pop(name) for name in SIZES}
        estimates = {name: given.pop(name) for name in ("devices", "tensor_parallel", "efficiency")}
        named = [f"--{name}" for name in SIZES if sizes[name] is not None]
        if (model is None) != bool(named):
            if model is not None:
                raise ValueError(f"--model measures and {', '.join(named)} estimates; give one or the other")
            raise ValueError(f"name a model to measure with --model, or the sizes of a GPT to estimate: {_wanted()}")
        if model is not None:
            _measure(context, model, out, nproc, given)
            return
        if nproc is not None:
            raise ValueError("--nproc starts ranks to measure with; an estimate needs none: leave it out")
        estimated = _estimate(sizes, given, estimates, out)
    _show(estimated, out)


def _measure(context: click.Context, model: str, out: Path, nproc: int | None, given: dict[str, Any]) -> None:
    from ..processes.launch import is_rank, local_devices, start_ranks
    from ..profiling.layers.named_profile import ProfileRequest, check_request, profile_named_model

    given["min_seconds"] = given.pop("seconds")
    request = ProfileRequest(model=model, out=out, **given)
    if is_rank():
        if nproc is not None:
            raise ValueError("--nproc starts ranks, but a launcher has started them already; leave it out")
        measured = profile_named_model(request, make_console())
        import os

        if os.environ["RANK"] == "0":
            _show(measured.profile, out)
        return
    check_request(request)
    arguments = ["--model", model, "--out", str(out), "--seconds", str(request.min_seconds)]
    arguments += ["--sequence", str(request.sequence), "--micro-batch", ",".join(map(str, request.micro_batches))]
    arguments += ["--optimizer", request.optimizer, "--precision", request.precision]
    if request.image_size is not None:
        arguments += ["--image-size", str(request.image_size)]
    for key, value in request.options.items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    start_ranks(nproc or local_devices(), "colossal_hetero.commands.profile", arguments)


def _estimate(sizes: dict[str, Any], given: dict[str, Any], estimates: dict[str, Any], out: Path) -> ModelProfile:
    from difflib import get_close_matches

    from ..planner.cluster.gpu_catalog import GPUS
    from ..planner.profile.estimate import estimated_profile
    from ..planner.profile.gpt import Transformer
    from ..planner.profile.layer_profile import save_model_profile

    missing = [f"--{name}" for name in SIZES if sizes[name] is None]
    if missing:
        raise ValueError(f"to estimate a GPT, give {_wanted()}; {', '.join(missing)} is missing")
    for name in estimates["devices"]:
        if name not in GPUS:
            close = get_close_matches(name, GPUS, n=1)
            raise ValueError(
                f"--device {name} is not known; valid: {', '.join(GPUS)}"
                + (f"; did you mean {close[0]}?" if close else "")
            )
    result = estimated_profile(
        Transformer(sequence=given["sequence"], **sizes),
        [GPUS[name] for name in estimates["devices"]],
        efficiency=estimates["efficiency"],
        micro_batches=given["micro_batches"],
        tensor_parallel=estimates["tensor_parallel"],
    )
    save_model_profile(result, out)
    return result


def _wanted() -> str:
    return ", ".join(f"--{name}" for name in SIZES) + ", --sequence and --device"


def _show(measured: ModelProfile, out: Path) -> None:
    from ..planner.report.profile_table import render_profile

    console = make_console()
    console.print(render_profile(measured))
    console.print(f"{out}: layers of {measured.name}, {measured.source}")


if __name__ == "__main__":  # a rank
    profile()
