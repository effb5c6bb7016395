"""``colossal-hetero import``: a profile of layers from files that other programs wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..common import MAX_LAYERS, Whole, check_outputs, errors_on_one_line, profile_out_option, show_profile

if TYPE_CHECKING:
    from ...planner.imports.whole_model import WholeModelTimes

__all__ = ["import_profile"]


@click.group("import")
def import_profile() -> None:
    """Make a profile of layers from logs and traces of other programs."""


WHOLE_MODEL_OPTIONS = (
    click.option("--layers", type=Whole(MAX_LAYERS), required=True, help="Transformer blocks of the GPT."),
    click.option("--hidden", type=Whole(), required=True, help="Hidden size."),
    click.option("--heads", type=Whole(), required=True, help="Attention heads per block."),
    click.option("--vocabulary", type=Whole(), required=True, help="Tokens in the vocabulary."),
    click.option("--sequence", type=Whole(), required=True, help="Tokens per sample."),
    click.option("--device", required=True, metavar="KIND", help="Kind of device, as in the cluster file."),
    click.option("--micro-batch", type=Whole(), required=True, help="Samples per micro-batch."),
    click.option(
        "--micro-batches",
        type=Whole(),
        required=True,
        help="Micro-batches of a rank per iteration.",
    ),
    click.option("--tp", type=Whole(), default=1, show_default=True, help="Tensor-parallel degree."),
    click.option(
        "--add-to",
        type=click.Path(path_type=Path),
        help="A profile of the same model that gets these times in addition.",
    ),
    profile_out_option,
)


def whole_model_options(command: Callable[..., None]) -> Callable[..., None]:
    """Adds :data:`WHOLE_MODEL_OPTIONS` to a command."""
    for option in reversed(WHOLE_MODEL_OPTIONS):
        command = option(command)
    return command


@import_profile.command("megatron")
@click.argument("log", type=click.Path(path_type=Path))
@whole_model_options
def import_megatron(log: Path, **options: Any) -> None:
    """Times in LOG, of a Megatron-LM run with --timing-log-level 2 and without pipeline stages.

    The log has no times of single layers and no sizes, so times are divided by the operations of each layer, and memory
    is that of a GPT of these sizes in half precision.
    """
    from ...planner.imports.megatron_log import read_megatron_log

    with errors_on_one_line():
        check_outputs(options["out"])
        times = read_megatron_log(log, options["micro_batches"])
        _write(times, f"timed by Megatron ({log.name})", **options)


@import_profile.command("trace")
@click.argument("trace", type=click.Path(path_type=Path))
@whole_model_options
def import_trace(trace: Path, **options: Any) -> None:
    """Times in TRACE, which torch.profiler exported with export_chrome_trace while one device trained.

    Forward, backward and the optimizer's step are told apart; they are divided over the layers, and memory is computed,
    as for a log of Megatron.
    """
    from ...planner.imports.torch_trace import read_torch_trace

    with errors_on_one_line():
        check_outputs(options["out"])
        times = read_torch_trace(trace, options["micro_batches"])
        _write(times, f"timed by torch.profiler ({trace.name})", **options)


def _write(
    times: WholeModelTimes,
    source: str,
    *,
    device: str,
    micro_batch: int,
    micro_batches: int,
    tp: int,
    add_to: Path | None,
    out: Path,
    **sizes: int,
) -> None:
    from ...planner.imports.whole_model import merged, profile_of_whole_model
    from ...planner.profile.gpt import Transformer
    from ...planner.profile.layer_profile import load_model_profile, save_model_profile

    result = profile_of_whole_model(
        Transformer(**sizes), device, times, micro_batch=micro_batch, tensor_parallel=tp, source=source
    )
    if add_to is not None:
        result = merged(load_model_profile(add_to), result)
    save_model_profile(result, out)
    show_profile(result, out)
