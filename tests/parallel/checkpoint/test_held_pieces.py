"""The pieces of all ranks are the model and optimizer of one process; boxes are sent to ranks that need them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero.checkpoint import layer_checkpoint
from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.exchange import BoxMemory, Outcome, fetch_boxes
from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier, TensorPiece
from colossal_hetero.checkpoint.transfers import Need, choose_sources
from tests.support.checkpoint_runs import (
    MODELS,
    boosted,
    different_tensors,
    gathered,
    hybrid,
    last_loss,
    load,
    samples_of,
    train,
)
from tests.support.checkpoints import read_weights
from tests.support.checks import on
from tests.support.training import make_step, sgd

STEPS = 2
ZERO = dict(zero_stage=1, precision="bf16")


def of_one_process(name: str) -> dict[str, Tensor]:
    model = MODELS[name]()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs = samples_of(name, number)
        outputs = model(inputs["x"]) if name == "vit" else model(**inputs)
        make_step(optimizer, last_loss(outputs, inputs))
    found: dict[str, Tensor] = {}
    for key, parameter in model.named_parameters():
        found[f"param.{key}"] = parameter.detach()
        found[f"momentum_buffer.{key}"] = optimizer.state[parameter]["momentum_buffer"]
    return found


@on(3, "llama", dict(tp_size=3))  # padded
@on(3, "vit", dict(tp_size=3))  # fused
@on(4, "gpt2", dict(tp_size=2, pp_size=2))  # fused, tied, padded
def the_pieces_of_all_ranks_are_those_of_one_process(name: str, options: dict[str, Any]) -> None:
    run = boosted(name, hybrid(**options), sgd)
    train(run, range(STEPS))
    torch.testing.assert_close(gathered(run).tensors, of_one_process(name), rtol=1e-4, atol=1e-6)


@on(4)
def zero_slices_are_those_of_colossalais_checkpoint(folder: Path) -> None:
    run = boosted("llama", hybrid(tp_size=2, **ZERO))
    train(run, range(STEPS))
    found = gathered(run).tensors
    run.booster.save_model(run.model, str(folder / "model"), shard=True)
    run.booster.save_optimizer(run.optimizer, str(folder / "optimizer"), shard=True)
    dist.barrier()
    for name, weight in read_weights(folder / "model").items():
        assert torch.equal(found[f"param.{name}"].to(weight.dtype), weight), name
    files = (folder / "optimizer").glob("*optim*.bin")
    parts = [torch.load(path, weights_only=True) for path in files if "group" not in path.name]
    states = {number: state for part in parts for number, state in part.items()}
    (names,) = run.outline.groups
    assert len(states) == len(names)
    for number, state in states.items():
        for entry, value in state.items():
            assert torch.equal(found[f"{entry}.{names[number]}"], torch.as_tensor(value)), f"{entry} of {names[number]}"


@on(4)
def another_plan_continues() -> None:
    one = boosted("gpt2", hybrid(pp_size=2, **ZERO), sgd)
    train(one, range(STEPS))
    saved = gathered(one)
    losses = train(one, range(STEPS, STEPS + 2))
    two = boosted("gpt2", hybrid(tp_size=2, precision="fp16"), sgd)
    train(two, [7])  # so that everything must be replaced
    load(two, saved)
    found = gathered(two)
    assert found.kinds == saved.kinds and different_tensors(found, saved) == []
    copies = two.optimizer.get_working_to_master_map()
    assert all(torch.equal(each, copies[id(each)].half()) for each in two.model.parameters())
    assert train(two, range(STEPS, STEPS + 2)) == pytest.approx(losses, rel=2e-2)


NODES = {0: "a", 1: "a", 2: "b"}
LAYERS = tuple(f"block-{number:04d}" for number in range(6))
WHOLE = Box((0, 0), (4, 6))
VALUES = {layer: torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * n for n, layer in enumerate(LAYERS)}
NEEDED = {0: Box((0, 0), (4, 3)), 1: Box((3, 1), (1, 2)), 2: Box((0, 0), (3, 6))}


def exchanged(unreadable: str | None) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """Node a has the rows and node b the columns of a grid; every rank needs other parts of it."""
    bitmap, rank = Bitmap(), dist.get_rank()
    for layer in LAYERS:
        for row in range(3):
            bitmap.add(layer, f"param.{layer}", Box((row, 0), (1, 6)), Location("a", StorageTier.DISK))
        bitmap.add(layer, f"param.{layer}", Box((0, 0), (4, 3)), Location("b", StorageTier.DISK))
    needs = {each: [Need(layer, f"param.{layer}", box, 4) for layer in LAYERS] for each, box in NEEDED.items()}
    data = {layer: torch.full(NEEDED[rank].sizes, -1.0) for layer in LAYERS}
    pieces = [TensorPiece(layer, f"param.{layer}", (4, 6), NEEDED[rank], data[layer], "whole") for layer in LAYERS]
    memory = BoxMemory(pieces, {piece.key: piece.shape for piece in pieces}, {piece.key: "float32" for piece in pieces})

    def fill(targets: Sequence[TensorPiece]) -> None:
        for target in targets:
            if target.layer == unreadable and rank == 2:
                raise CheckpointError("damaged")
            target.data.copy_(VALUES[target.layer][WHOLE.slices_of(target.box)])

    return fetch_boxes(choose_sources(needs, NODES, bitmap), NODES, memory, fill), data


@on(3, None)
@on(3, LAYERS[1])
def ranks_get_what_only_other_nodes_have(unreadable: str | None) -> None:
    outcome, data = exchanged(unreadable)
    for layer in LAYERS:
        if layer != unreadable:
            assert torch.equal(data[layer], VALUES[layer][WHOLE.slices_of(NEEDED[dist.get_rank()])])
    assert all(each.layer == unreadable for each in outcome.left)
    found = [(unreadable, Location("b", StorageTier.DISK), "damaged")] if dist.get_rank() == 2 and unreadable else []
    assert outcome.problems == found
    # Ranks 0 and 1 lack a part of the last row, and rank 2 the right half of three rows.
    lost = int(unreadable is not None)
    layers = len(LAYERS) - lost * (dist.get_rank() < 2)
    assert (outcome.received_bytes, len(outcome.left)) == (layers * 4 * (3, 2, 9)[dist.get_rank()], lost)


@on(2, "192.0.2.1", "127.0.0.2")
@on(2, "127.0.0.1", "127.0.0.1")
def the_store_of_messages_is_on_the_machine_of_rank_0(master: str, own: str) -> None:
    """192.0.2.1 is on no machine; 127.0.0.2 leads here, and stands for an address of rank 0's machine."""
    os.environ["MASTER_ADDR"] = master
    is_loopback = {"_is_loopback": lambda address: address == "127.0.0.1"}
    with patch.multiple(layer_checkpoint, own_address=lambda: own, STORE_SECONDS=5.0, **is_loopback):
        store = layer_checkpoint._new_store()
    assert store is not None
    if dist.get_rank() == 1:
        store.set("key", "value")
    assert store.get("key") == b"value"
    dist.barrier()
