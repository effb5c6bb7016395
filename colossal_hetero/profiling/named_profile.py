"""Profile a named model as one of several ranks; used by ``colossal-hetero profile``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer import ShardConfig, ShardFormer
from rich.console import Console
from torch import nn

from ..colossalai_support.accelerator import get_accelerator
from ..common.launch import local_gpu
from ..layers.policy import hetero_policy
from ..planner.profile.estimate import IMAGE_SIZE, VITS
from ..planner.profile.layer_profile import save_profile
from .layer_profiler import MIN_SECONDS, profile_layers
from .merge_ranks import MeasuredLayers, merge_degrees
from .model_layers import count_blocks
from .progress import ProgressDisplay

CLASSES = 10  # number of classes, if the model has none


@dataclass(frozen=True, eq=False)
class NamedModel:
    model: nn.Module
    batch: Any
    criterion: Callable | None


def build_model(
    name: str,
    *,
    image_size: int | None = None,
    sequence: int = 512,
    options: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> NamedModel:
    """Build ``timm:vit_tiny_patch16_224``, ``hf:gpt2``, ``hf:/folder/with/config.json`` or ``vit-1b``."""
    if name in VITS:
        sizes = VITS[name]
        own = {"embed_dim": sizes.hidden, "depth": sizes.depth, "num_heads": sizes.heads, "patch_size": sizes.patch}
        options = own | {"num_classes": CLASSES, "class_token": False, "global_pool": "avg"} | dict(options or {})
        return _from_timm("vit_base_patch16_224", image_size or IMAGE_SIZE, sequence, options, torch.device(device))
    library, _, model = name.partition(":")
    builders = {"timm": _from_timm, "hf": _from_transformers}
    if library not in builders or not model:
        words = f"write for example timm:vit_tiny_patch16_224 or hf:gpt2, or one of {', '.join(VITS)}"
        raise ValueError(f"{name!r} is not a model name; {words}")
    return builders[library](model, image_size, sequence, dict(options or {}), torch.device(device))


def _from_timm(
    name: str, image_size: int | None, sequence: int, options: dict[str, Any], device: torch.device
) -> NamedModel:
    import timm

    if not timm.is_model(name.split(".")[0]):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.3)
        raise ValueError(f"timm has no model {name!r}; it has for example {', '.join(close) or 'vit_tiny_patch16_224'}")
    config = timm.get_pretrained_cfg(name)
    if image_size is not None and (config is None or config.fixed_input_size):  # others take images of any size
        options["img_size"] = image_size
    model = _built(f"timm:{name}", options, device, lambda: timm.create_model(name, pretrained=False, **options))
    size = image_size or model.default_cfg["input_size"][-1]
    channels = model.default_cfg["input_size"][0]
    images = torch.randn(1, channels, size, size, device=device)
    classes = max(getattr(model, "num_classes", CLASSES), 1)
    labels = torch.zeros(1, dtype=torch.long, device=device).clamp(max=classes - 1)
    return NamedModel(model, (images, labels), nn.functional.cross_entropy)


def _from_transformers(
    name: str, image_size: int | None, sequence: int, options: dict[str, Any], device: torch.device
) -> NamedModel:
    import transformers

    transformers.logging.set_verbosity_error()
    config = _config(name, options)
    if image_size is not None:
        if not hasattr(config, "image_size"):
            raise ValueError(f"hf:{name} does not take images; leave the image size out")
        config.image_size = image_size
    if hasattr(config, "image_size") and hasattr(config, "num_channels"):
        heads: list[Any] = [transformers.AutoModelForImageClassification]
        batch = {
            "pixel_values": torch.randn(1, config.num_channels, config.image_size, config.image_size, device=device),
            "labels": torch.zeros(1, dtype=torch.long, device=device),
        }
    else:
        heads = [transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM]
        longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or sequence
        if sequence > longest:
            raise ValueError(f"hf:{name} takes at most {longest} tokens, not {sequence}")
        # Token 2, because several models use 0 or 1 for padding.
        tokens = torch.full((1, sequence), 2, dtype=torch.long, device=device)
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        # transformers could also build these encoders as decoders, but those are other models.
        if config.model_type in ("bert", "roberta", "electra", "albert"):
            heads = heads[1:]
    head = next((each for each in heads if type(config) in each._model_mapping), None)
    if head is None:
        raise ValueError(f"hf:{name} ({type(config).__name__}) has no trainable head for text or images")
    return NamedModel(_built(f"hf:{name}", options, device, lambda: head.from_config(config)), batch, None)


def _config(name: str, options: dict[str, Any]) -> Any:
    from transformers import CONFIG_MAPPING, AutoConfig

    if name in CONFIG_MAPPING:
        config = CONFIG_MAPPING[name]()
    elif Path(name, "config.json").is_file():
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    else:
        # "bert-base-uncased" is a checkpoint of the type "bert".
        begins = sorted((each for each in CONFIG_MAPPING if name.startswith(each)), key=len)
        close = begins[-1:] or difflib.get_close_matches(name, list(CONFIG_MAPPING), n=3, cutoff=0.3)
        raise ValueError(
            f"transformers has no model type {name!r} (and there is no {Path(name, 'config.json')}); try "
            f"{' or '.join(f'hf:{each}' for each in close or ('gpt2', 'llama', 'bert'))}"
        )
    for key, value in options.items():
        if not hasattr(config, key):
            close = difflib.get_close_matches(key, list(config.to_dict()), n=1)
            raise ValueError(f"hf:{name} has no option {key!r}" + (f"; did you mean {close[0]}?" if close else ""))
        setattr(config, key, value)
    return config


def _built(name: str, options: Mapping[str, Any], device: torch.device, build: Callable[[], Any]) -> Any:
    try:
        with device:
            return build()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        words = ", ".join(f"{key}={value}" for key, value in options.items()) or "its defaults"
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{name} cannot be built with {words}: {reason}") from None


def check_degrees(model: nn.Module, degrees: Sequence[int], ranks_per_node: int) -> None:
    heads = getattr(getattr(model, "config", None), "num_attention_heads", None)
    if heads is None:
        heads = next((each.num_heads for each in model.modules() if hasattr(each, "num_heads")), None)
    for degree in degrees:
        if ranks_per_node < degree:
            raise ValueError(
                f"tensor parallel {degree} needs {degree} devices on this machine, but there "
                f"{'is' if ranks_per_node == 1 else 'are'} {ranks_per_node}; measure degrees of at most "
                f"{ranks_per_node}"
            )
        if ranks_per_node % degree:
            raise ValueError(
                f"{ranks_per_node} ranks cannot be divided into tensor-parallel groups of {degree}; start a multiple "
                f"of {degree}"
            )
        if isinstance(heads, int) and heads % degree:
            raise ValueError(
                f"tensor parallel {degree} does not divide the {heads} attention heads of {type(model).__name__}; use "
                f"a divisor of {heads}"
            )


def shard(model: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    config = ShardConfig(tensor_parallel_process_group=group, enable_tensor_parallelism=True)
    try:
        return ShardFormer(config).optimize(model, policy=hetero_policy(model))[0]
    except AssertionError as error:
        raise ValueError(f"{type(model).__name__} cannot be divided over {group.size()} ranks: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Model, settings and output file; see :func:`build_model` and :func:`.layer_profiler.profile_layers`."""

    model: str
    out: Path
    image_size: int | None = None
    sequence: int = 512
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batches: Sequence[int] = (1, 2, 4, 8)
    optimizer: str = "adam"
    precision: str = "fp32"
    min_seconds: float = MIN_SECONDS
    tensor_parallel: Sequence[int] = (1,)  # degrees to measure, ascending

    def build(self, device: torch.device | str) -> NamedModel:
        sizes: dict[str, Any] = dict(image_size=self.image_size, sequence=self.sequence)
        return build_model(self.model, **sizes, options=self.options, device=device)


def check_request(request: ProfileRequest, ranks_per_node: int) -> int:
    """Check the request before any rank starts, without building weights; returns the number of blocks of the model."""
    named = request.build("meta")
    check_degrees(named.model, request.tensor_parallel, ranks_per_node)
    return count_blocks(named.model)


def profile_named_model(request: ProfileRequest, console: Console) -> MeasuredLayers:
    """Measure with all ranks of the launcher; rank 0 shows the progress and writes the file."""
    rank = int(os.environ["RANK"])
    device = _device(rank)
    torch.set_num_threads(max(int(os.environ.get("OMP_NUM_THREADS", "1")), 1))
    dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    try:
        with console.status(f"building {request.model}") as status:
            parts = []
            for degree in request.tensor_parallel:
                place = "" if len(request.tensor_parallel) == 1 else f" at tensor parallel {degree}"
                show = ProgressDisplay(console, status, place)
                parts.append((degree, _measure(request, degree, device, show if rank == 0 else None)))
        measured, remarks = merge_degrees(parts)
        if rank == 0:
            for remark in remarks:
                console.print(remark, markup=False, soft_wrap=True)
            save_profile(measured.profile, request.out)
        # No rank may leave while another still asks rank 0 for the addresses of the others.
        dist.barrier()
        return measured
    except RuntimeError as error:
        raise ValueError(str(error).splitlines()[0]) from error
    finally:
        dist.destroy_process_group()


def _measure(
    request: ProfileRequest, degree: int, device: torch.device, on_progress: ProgressDisplay | None
) -> MeasuredLayers:
    torch.manual_seed(0)
    named = request.build(device)
    model, batch, group = named.model, named.batch, None
    if degree > 1:
        check_degrees(model, [degree], int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        # Of neighboring ranks; the degree divides their number.
        group, _ = dist.new_subgroups(degree, backend="nccl" if device.type == "cuda" else "gloo")
        model = shard(model, group)
        if isinstance(batch, dict) and "input_ids" in batch:
            # Colossal-AI's sharded models need a mask, even if nothing is masked.
            batch = {**batch, "attention_mask": torch.ones_like(batch["input_ids"])}
    names = ("micro_batches", "optimizer", "precision", "min_seconds")
    of = {name: getattr(request, name) for name in names} | dict(tensor_parallel=degree, group=group)
    return profile_layers(model, batch, named.criterion, **of, name=request.model, on_progress=on_progress)


def _device(rank: int) -> torch.device:
    gpu = local_gpu(rank, "measure")
    if gpu is not None:
        return gpu
    is_other = get_accelerator().name not in ("cpu", "cuda")
    return torch.device(get_accelerator().get_current_device()) if is_other else torch.device("cpu")
