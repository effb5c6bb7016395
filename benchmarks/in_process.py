"""A tensor-parallel group inside one process, to study how resizing changes training without a second device. It
computes ``e`` shards in turn by the layers' code, as ``e`` processes would up to the order of summation."""

from __future__ import annotations

from typing import Literal

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from colossal_hetero.layers.linear import HeteroLinear


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
