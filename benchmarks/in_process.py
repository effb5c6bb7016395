"""A tensor-parallel group inside one process, to study how resizing changes training without a second device. It
computes ``e`` shards in turn by the layers' code, as ``e`` processes would up to the order of summation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from rich.progress import Progress
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from colossal_hetero.common.files import write_json
from colossal_hetero.layers.linear import HeteroLinear
from examples.common.images import load_data
from examples.vit.options import parse_options


class InProcessShard(HeteroLinear):
    """One rank's part of an :class:`InProcessLinear`, with the interface of a real rank's layer."""

    seq_parallel_mode = None
    use_zbv = False
    fp8_communication = False

    def __init__(self, owner: InProcessLinear, rank: int) -> None:
        self._owner = owner
        self._rank = rank
        self.column_parallel = owner.split == "column"
        self._previous = {}

    @property
    def weight(self) -> Tensor:
        """``[N/e, K]`` or ``[N, K/e]``, a view of the whole weight; gradients are added to the whole weight."""
        return self._owner.part(self._owner.weight, self._rank, 0 if self._owner.split == "column" else 1)

    @property
    def training(self) -> bool:
        return self._owner.training

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return self._multiply(x, bias, None)


class InProcessLinear(nn.Module):
    """A linear layer with weight ``[N, K]``, computed as ``e`` tensor-parallel ranks would compute it.

    Args:
        linear: the layer whose parameters are used.
        ranks: ``e``.
        split: ``column`` (outputs divided over ranks) or ``row`` (inputs divided).
        parts: number of equal fused parts of the outputs (3 for q, k and v), each divided over the ranks.
    """

    def __init__(self, linear: nn.Linear, ranks: int, split: Literal["column", "row"], parts: int = 1) -> None:
        super().__init__()
        size = linear.out_features if split == "column" else linear.in_features
        if size % (ranks * parts) != 0:
            raise ValueError(f"{size} {split} features cannot be divided into {parts} parts over {ranks} ranks")
        self.weight, self.bias, self.split, self._parts, self._ranks = linear.weight, linear.bias, split, parts, ranks
        self.shards = tuple(InProcessShard(self, rank) for rank in range(ranks))

    def part(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """Slices of ``whole`` along ``dim`` that belong to ``rank``."""
        pieces = whole.unflatten(dim, (self._parts, self._ranks, -1)).select(dim + 1, rank)
        return pieces.flatten(dim, dim + 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.split == "row":
            products = [shard.multiply(self.part(x, rank, x.dim() - 1), None) for rank, shard in enumerate(self.shards)]
            y = torch.stack(products).sum(0)
            return y if self.bias is None else y + self.bias
        outputs = []
        for rank, shard in enumerate(self.shards):
            bias = None if self.bias is None else self.part(self.bias, rank, 0)
            outputs.append(shard.multiply(x, bias).unflatten(-1, (self._parts, -1)))
        return torch.cat(outputs, dim=-1).flatten(-2)


def shard_in_process(model: VisionTransformer, ranks: int) -> list[dict[str, InProcessShard]]:
    """Replace the linear layers of ``model`` by :class:`InProcessLinear`; returns each rank's shards by name."""
    shards: list[dict[str, InProcessShard]] = [{} for _ in range(ranks)]
    for number, block in enumerate(model.blocks):
        for owner, name, split, parts in (
            (block.attn, "qkv", "column", 3),
            (block.attn, "proj", "row", 1),
            (block.mlp, "fc1", "column", 1),
            (block.mlp, "fc2", "row", 1),
        ):
            layer = InProcessLinear(getattr(owner, name), ranks, split, parts)  # type: ignore[arg-type]
            setattr(owner, name, layer)
            for rank, shard in enumerate(layer.shards):
                shards[rank][f"blocks.{number}.{name}"] = shard
    return shards


BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 1e-3, 0.05


def accuracies(
    model: VisionTransformer,
    data: tuple[Any, Any],
    seed: int,
    epochs: int,
    *,
    most_images: int | None = None,
    begin_epoch: Callable[[int], None] = lambda epoch: None,
    end_iteration: Callable[[], None] = lambda: None,
) -> list[float]:
    """Train from scratch with AdamW in one cycle; the accuracy on held-out images after each epoch, in percent.

    Args:
        model: for images of 32 × 32 pixels.
        data: as :func:`read_images` returns it.
        seed: of the order of the images.
        epochs: number of epochs.
        most_images: of an epoch; None: all.
        begin_epoch: called before each epoch with its number.
        end_iteration: called after each iteration.
    """
    images, held_out = data
    iterations = min(len(images), most_images or len(images)) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=iterations * epochs, pct_start=0.1
    )
    generator = torch.Generator().manual_seed(seed)
    found = []
    for epoch in range(epochs):
        images.set_epoch(epoch)
        model.train()
        begin_epoch(epoch)
        for batch in torch.randperm(len(images), generator=generator)[: iterations * BATCH].view(iterations, BATCH):
            x, y = images.__getitems__(batch)
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            end_iteration()
        model.eval()
        with torch.no_grad():
            parts = (held_out.__getitems__(part) for part in torch.arange(len(held_out)).split(500))
            right = sum(int((model(x).argmax(-1) == y).sum()) for x, y in parts)
        found.append(100.0 * right / len(held_out))
    return found


def read_images(data_dir: str, seed: int) -> tuple[Any, Any]:
    """Images to train on and held out, from train/CLASS/* and test/CLASS/*, as the ViT example reads them."""
    options = parse_options(["--data", "folder", "--data-dir", data_dir, "--seed", str(seed)])
    return load_data(options, track=lambda items, _: iter(items))


def train_all(
    runs: Mapping[str, Any], train: Callable[[Any, str], list[float]], data_dir: str, path: Path, jobs: int | None
) -> dict[str, list[float]]:
    """What ``train`` returns for each run and the folder of images, by the run's key, in so many processes.

    Finished runs are kept in the file ``path`` and not repeated.
    """
    kept: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    left = {key: run for key, run in runs.items() if key not in kept}
    with Progress() as progress, ProcessPoolExecutor(jobs) as pool:
        task = progress.add_task("training", total=len(left))
        futures = {pool.submit(_alone, train, run, data_dir): key for key, run in left.items()}
        for future in as_completed(futures):
            kept[futures[future]] = future.result()
            write_json(kept, path)
            progress.advance(task)
    return {key: kept[key] for key in runs}


def _alone(train: Callable[[Any, str], list[float]], run: Any, data_dir: str) -> list[float]:
    torch.set_num_threads(1)
    return train(run, data_dir)
