"""The pieces of all ranks are the model and optimizer of one process; boxes are sent to ranks that need them. Of
damaged checkpoints, layers come from other nodes, and the newest whole checkpoint is loaded, in words."""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero import CheckpointConfig
from colossal_hetero.checkpoint import layer_checkpoint
from colossal_hetero.checkpoint.config import CheckpointError
from colossal_hetero.checkpoint.exchange import BoxMemory, Outcome, fetch_boxes
from colossal_hetero.checkpoint.pieces import Bitmap, Box, Location, StorageTier, TensorPiece
from colossal_hetero.checkpoint.places import Place, entries
from colossal_hetero.checkpoint.transfers import Need, choose_sources
from tests.support import checkpoint_runs
from tests.support.checkpoint_runs import MODELS, Run, boosted, different_tensors, gathered, hybrid, load, saving, train
from tests.support.checks import of_all_ranks, on
from tests.support.training import make_step, read_weights, sgd

STEPS = 2
ZERO = dict(zero_stage=1, precision="bf16")


def of_one_process(name: str) -> dict[str, Tensor]:
    model = MODELS[name]()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs = checkpoint_runs.samples_of(name, number)
        outputs = model(inputs["x"]) if name == "vit" else model(**inputs)
        make_step(optimizer, checkpoint_runs.last_loss(outputs, inputs))
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


# Damaged checkpoints -------------------------------------------------------------------------------------------------


STEP = "step-00000001"
DAMAGED = ("block-0002.whole.safetensors", "states.bin")


def on_two_nodes(folder: Path, shared: bool = False, **options: Any) -> Run:
    """A run whose first half of the ranks is on node a and whose second half is on node b."""
    node = "ab"[2 * dist.get_rank() // dist.get_world_size()]
    config = CheckpointConfig(local=folder / node, shared=folder / "shared" if shared else None, node=node)
    return boosted("gpt2", hybrid(**options, checkpoints=config))


def save(folder: Path, options: dict[str, Any], shared: bool = False) -> Any:
    run = on_two_nodes(folder, shared, **options)
    train(run, [0])
    run.save(1)
    dist.barrier()
    return gathered(run)


@on(4)
def layers_come_from_the_node_that_has_them(folder: Path) -> None:
    saved, received = save(folder, dict(tp_size=2, pp_size=2)), []
    for options in (dict(tp_size=4), dict(pp_size=4), dict(tp_size=2, pp_size=2)):
        run = on_two_nodes(folder, **options)
        start = run.resume()
        assert different_tensors(gathered(run), saved) == []
        needed = sum(piece.data.numel() * piece.data.element_size() for piece in run.pieces)
        assert start.read_bytes + start.received_bytes >= needed
        everyone = of_all_ranks((start.read_bytes, needed))
        assert sum(read for read, _ in everyone) <= sum(needed for _, needed in everyone)
        received.append(start.received_bytes)
    # Four stages on two nodes need the same layers as two, except that the last stage needs the tied embedding, which
    # node b has as well.
    assert received[0] > 0 and received[1:] == [0, 0]


@contextmanager
def warned_of(words: str) -> Iterator[list[str]]:
    """A list to which the warnings of the block with these words are added at its end."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if words in str(each.message)]


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@on(2, False, flipped)
@on(2, True, flipped)
@on(2, True, cut_off)
@on(2, False, Path.unlink)
def a_damaged_file_is_replaced_by_that_of_another_node_or_the_shared_folder(
    shared: bool, damage: Callable[[Path], None], folder: Path
) -> None:
    saved = save(folder, {}, shared)
    before: dict[str, bytes] = {}
    if dist.get_rank() == 0:
        for name in DAMAGED:
            path = folder / "a" / STEP / name
            before[name] = path.read_bytes()
            damage(path)
    dist.barrier()
    run = on_two_nodes(folder, shared)
    with warned_of("a checkpoint is damaged") as found:
        start = run.resume()
    assert different_tensors(gathered(run), saved) == []
    assert bool(found) == (dist.get_rank() == 0)
    for name, content in before.items():
        assert (folder / "a" / STEP / name).read_bytes() == content
        assert any(name in message and "the damaged file was replaced" in message for message in found), found
    assert len(list((folder / "a" / STEP).iterdir())) == len(list((folder / "b" / STEP).iterdir()))
    receives = dist.get_rank() == 0 and (not shared or damage is not flipped)
    assert (start.received_bytes > 0) == receives


@on(2)
def a_full_disk_does_not_stop_the_run(folder: Path) -> None:
    def replace(place: Place, file: str, content: Iterable[memoryview]) -> None:
        next(iter(content))
        raise OSError("no space left")

    for shared in (False, True):
        root = folder / f"full-{shared}"
        save(root, {}, shared)
        if dist.get_rank() == 0:
            flipped(root / "a" / STEP / DAMAGED[0])
        dist.barrier()
        run = on_two_nodes(root, shared)
        with patch.object(Place, "replace", replace), warned_of("replaced") as said:
            run.resume()
        assert bool(said) == (dist.get_rank() == 0)
        assert not said or "could not be replaced by that of node b: no space left" in said[-1]


@on(2)
def layers_that_are_lost_are_named_and_without_its_states_no_checkpoint_is_whole(folder: Path) -> None:
    save(folder / "lost", dict(pp_size=2))
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "lost" / "b")
    dist.barrier()
    run = on_two_nodes(folder / "lost")
    words = r"no checkpoint is whole.*that of step 1 lacks block-0002\.whole\.safetensors and.*node a"
    with pytest.raises(RuntimeError, match=words):
        run.resume()
    save(root := folder / "states", {})
    (root / "ab"[dist.get_rank()] / STEP / "states.bin").unlink()
    dist.barrier()
    run = on_two_nodes(root)
    with pytest.raises(RuntimeError, match=r"that of step 1 lacks states\.bin"):
        run.resume()
    (entry,) = entries(root / "a")
    assert len(entry.faults) == 1 and "states.bin is missing" in entry.faults[0]
    assert run.plugin._checkpoints.files.newest_step() is None


def make_unreadable(path: Path) -> None:
    """Also for root, who may read everything: a folder in place of the file, of the same size for ``stat``."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


FALLBACKS: list[tuple[Callable[[Path], None], str]] = [
    (cut_off, "block-0001*.safetensors"),
    (Path.unlink, "states.bin"),
    (flipped, "manifest.json"),
    (make_unreadable, "part-*.json"),
]


@on(2)
def the_newest_whole_checkpoint_is_loaded(folder: Path) -> None:
    run = boosted("vit", saving(folder / "saved"))
    for step in (1, 2):
        train(run, [step])
        run.save(step)
        if step == 1:
            expected = gathered(run)
    for damage, name in FALLBACKS:
        copy = folder / damage.__name__
        if dist.get_rank() == 0:
            shutil.copytree(folder / "saved", copy)
            damage(next((copy / "step-00000002").glob(name)))
        dist.barrier()
        resumed = boosted("vit", saving(copy))
        with warned_of("a newer checkpoint is not whole") as said:
            assert resumed.resume().step == 1, name
        assert different_tensors(gathered(resumed), expected) == [], name
        assert len(said) == (dist.get_rank() == 0), (name, said)
        for words in said:
            assert "that of step 2" in words and "Training continues from that of step 1" in words, words
