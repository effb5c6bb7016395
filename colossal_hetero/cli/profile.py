"""``colossal-hetero profile``: measure how long a model's layers take on the devices of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..common.launch import is_rank, local_devices, start_ranks
from .common import (
    Numbers,
    amount_option,
    check_outputs,
    choice_option,
    errors_on_one_line,
    make_console,
    micro_batch_option,
    profile_out_option,
    show_profile,
)

if TYPE_CHECKING:
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
@micro_batch_option
@choice_option("--optimizer", "adam", "adamw", "sgd", help="Optimizer whose step is measured.")
@choice_option("--precision", "fp32", "fp16", "bf16", help="Precision in which the layers are measured.")
@amount_option(
    "--seconds", "SECONDS", "Measure each micro-batch for at least this long.", default=3.0, show_default=True
)
@click.option(
    "--tp",
    "tensor_parallel",
    type=Numbers(),
    default="1",
    show_default=True,
    help="Tensor-parallel degrees to measure, e.g. 1,2.",
)
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Ranks to start on this machine; default: one per GPU, or on the CPU as many as the largest --tp.",
)
@profile_out_option
def profile(model: str | None, out: Path, nproc: int | None, tensor_parallel: tuple[int, ...], **given: Any) -> None:
    """Measure how long a model's layers take on the devices of this machine.

    `colossal-hetero estimate` computes such a profile from the sizes of a GPT instead. For several machines, run this
    command on each of them under a launcher:

    torchrun --nnodes ... --nproc-per-node ... -m colossal_hetero.cli.main profile --model ...
    """
    with errors_on_one_line():
        check_outputs(out)
        if model is None:
            raise ValueError(
                "name a model to measure with --model; for an estimate from the sizes of a GPT use "
                "colossal-hetero estimate"
            )
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

    measured = profile_named_model(request, make_console())
    if os.environ["RANK"] == "0":
        show_profile(measured.profile, request.out)
