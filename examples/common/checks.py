"""What each example checks before its ranks start: flags first, then data and model, which need torch."""

from __future__ import annotations

from .flags import language, pipeline, vit, zero

__all__ = ["check_language", "check_pipeline", "check_vit", "check_zero"]

# Data and models are imported inside the functions: errors in flags come before torch is loaded.


def check_vit(options: vit.VitOptions, world_size: int) -> None:
    """Raise ``UsageError`` if the ViT example cannot run with these options on that many ranks."""
    layout = vit.check_options(options, world_size)
    from .images import find_data
    from .vit import check_model

    find_data(options, options.batch_size)
    check_model(options, layout)


def check_zero(options: zero.ZeroOptions, world_size: int) -> None:
    """Raise ``UsageError`` if the ZeRO example cannot run with these options on that many ranks."""
    zero.check_options(options, world_size)
    from .images import find_data

    find_data(options, options.global_batch, "--global-batch")


def check_pipeline(options: pipeline.PipelineOptions, world_size: int) -> None:
    """Raise ``UsageError`` if the pipeline example cannot run with these options on that many ranks."""
    pipeline.check_options(options, world_size)
    from .images import find_data

    find_data(options, options.global_batch, "--global-batch")


def check_language(options: language.LanguageOptions, world_size: int) -> None:
    """Raise ``UsageError`` if the language example cannot run with these options on that many ranks."""
    language.check_options(options, world_size)
