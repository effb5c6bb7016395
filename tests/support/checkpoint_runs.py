"""Runs whose pieces a test gathers in memory, and loads into runs with other plans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.shardformer.layer.utils import Randomizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin
from colossal_hetero.checkpoint.held_pieces import pieces_of
from colossal_hetero.checkpoint.layer_checkpoint import Start
from colossal_hetero.checkpoint.model_outline import ModelOutline, outline_of
from colossal_hetero.checkpoint.optimizer_memory import state_entries
from colossal_hetero.checkpoint.pieces import Box, TensorPiece
from colossal_hetero.checkpoint.restoring import Restoring
from colossal_hetero.checkpoint.run_states import Training
from tests.support.language_models import VOCABULARY, gpt2, llama
from tests.support.training import CLASSES, adamw, mean_over_replicas, pipeline_step, tiny_vit

MODELS: dict[str, Callable[..., nn.Module]] = {
    "gpt2": lambda **options: gpt2(n_layer=4, use_cache=False, **options),
    "llama": lambda **options: llama(num_hidden_layers=4, use_cache=False, **options),
    "vit": lambda **options: tiny_vit(depth=4, **options),
}
"""Small models of four blocks, whose sizes are divisible by 2, 3 and 4."""

SAMPLES = 24  # in a global batch: divisible by the numbers of replicas and of micro-batches.


@dataclass
class Run:
    """A model of :data:`MODELS` that a plugin has boosted."""

    name: str
    plugin: Any
    booster: Booster
    model: Any
    optimizer: Any
    outline: ModelOutline

    @property
    def pieces(self) -> list[TensorPiece]:
        return pieces_of(self.model, self.optimizer, self.outline)

    def save(self, step: int) -> None:
        self.plugin.save(self.model, self.optimizer, step=step)
        self.plugin.wait_for_saves()

    def resume(self) -> Start:
        return self.plugin.resume(self.model, self.optimizer)


def boosted(name: str, plugin: Any, make_optimizer: Callable[[nn.Module], Optimizer] = adamw, **options: Any) -> Run:
    Randomizer.reset_index()  # ranks of an earlier run may have made different numbers of layers
    model = MODELS[name](**options)
    optimizer = make_optimizer(model)
    outline = outline_of(model, optimizer)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer, last_loss)
    return Run(name, plugin, booster, model, optimizer, outline)


def hybrid(**options: Any) -> HeteroHybridParallelPlugin:
    # A vocabulary of 101 is padded to 128, 144 or 128 rows on 2, 3 or 4 ranks, each of which has some that count.
    defaults: dict[str, Any] = dict(precision="fp32", make_vocab_size_divisible_by=16)
    if "plan" not in options:
        defaults |= dict(tp_size=1, pp_size=1)
    if options.get("pp_size", 1) > 1:
        defaults["num_microbatches"] = options["pp_size"]
    return HeteroHybridParallelPlugin(**(defaults | options))


def saving(folder: Path, **options: Any) -> HeteroHybridParallelPlugin:
    """A plugin that saves into a shared folder."""
    return hybrid(**options, checkpoints=CheckpointConfig(shared=folder))


def samples_of(name: str, number: int) -> dict[str, Tensor]:
    """The global batch with this number."""
    generator = torch.Generator().manual_seed(number)
    if name == "vit":
        images = torch.randn(SAMPLES, 3, 8, 8, generator=generator)
        return dict(x=images, labels=torch.arange(SAMPLES) % CLASSES)
    ids = torch.randint(VOCABULARY, (SAMPLES, 12), generator=generator)
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids.clone())


def last_loss(outputs: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    return outputs.loss if hasattr(outputs, "loss") else cross_entropy(outputs.float(), inputs["labels"])


def train(run: Run, numbers: Iterable[int]) -> list[float]:
    """Train on these global batches, each replica on its part; the mean loss of each, the same on all ranks."""
    losses = []
    replica, parts = parts_of(run.plugin)
    for number in numbers:
        batch = {key: value.split(parts)[replica] for key, value in samples_of(run.name, number).items()}
        losses.append(mean_over_replicas(pipeline_step(run, iter([batch]), last_loss), parts[replica]))
    return losses


def parts_of(plugin: HeteroHybridParallelPlugin) -> tuple[int, list[int]]:
    """Number of this rank's replica, and how many samples of a global batch each replica has."""
    if plugin.plan is not None:
        plan = plugin.plan
        return plugin.replica()[0], [replica.micro_batches * plan.micro_batch for replica in plan.replicas]
    replicas = dist.get_world_size(plugin.dp_group)
    return dist.get_rank(plugin.dp_group), [SAMPLES // replicas] * replicas


@dataclass
class InMemory:
    """All pieces of all ranks put together, as a checkpoint would be."""

    tensors: dict[str, Tensor]
    kinds: dict[str, str]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {key: tuple(tensor.shape) for key, tensor in self.tensors.items()}


def gathered(run: Run, everywhere: bool = True) -> InMemory:
    """What all ranks hold. Every element must be there, and be equal on all ranks that hold it."""
    own = [(piece.key, piece.shape, piece.box, piece.data.clone()) for piece in run.pieces]
    everyone: list[Any] = [None] * dist.get_world_size()
    if everywhere:
        dist.all_gather_object(everyone, (own, state_entries(run.optimizer)))
    else:
        first = dist.get_rank() == 0
        dist.gather_object((own, state_entries(run.optimizer)), everyone if first else None)
        everyone = everyone if first else []
    tensors: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for key, shape, box, data in (piece for pieces, _ in everyone for piece in pieces):
        tensor = tensors.setdefault(key, data.new_zeros(shape))
        there = filled.setdefault(key, torch.zeros(shape, dtype=torch.bool))
        place = Box((0,) * len(shape), shape).slices_of(box)
        assert torch.equal(torch.where(there[place], tensor[place], data), data), f"{key} differs between ranks"
        tensor[place] = data
        there[place] = True
    assert all(bool(there.all()) for there in filled.values())
    return InMemory(tensors, {entry: kind for _, kinds in everyone for entry, kind in kinds.items()})


def different_tensors(found: InMemory, expected: InMemory) -> list[str]:
    """Keys of the tensors that are not equal bit for bit, or that only one of both has."""
    keys = sorted(found.tensors.keys() | expected.tensors.keys())
    return [
        key
        for key in keys
        if key not in found.tensors
        or key not in expected.tensors
        or not torch.equal(found.tensors[key], expected.tensors[key])
    ]


def load(run: Run, saved: InMemory) -> None:
    training = Training(run.model, run.optimizer, None, None, run.outline)
    restoring = Restoring(training, saved.shapes, saved.kinds)
    for piece in restoring.pieces:
        everything = Box((0,) * len(piece.shape), piece.shape)
        piece.data.copy_(saved.tensors[piece.key][everything.slices_of(piece.box)])
    restoring.finish()
