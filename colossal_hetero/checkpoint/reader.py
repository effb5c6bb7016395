"""Reader of a layer checkpoint: each box from the nearest whole copy; export of the parameters to files."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from ..common.atomic_files import replacing
from ..common.files import write_json
from .config import CheckpointError
from .pieces import STATES, RunState, TensorPiece, cover, whole
from .places import Checkpoint, Copy, Place, find_checkpoints
from .records import FileCheck, FileRecord, ItemRecord
from .storage import DamagedCopy


class CheckpointReader:
    """Reads a checkpoint of any plan from its nearest whole copies. Several threads may call :meth:`load`.

    ``others`` are named in errors where they are whole.
    """

    def __init__(self, checkpoint: Checkpoint, others: Sequence[Checkpoint] = ()) -> None:
        self.checkpoint = checkpoint
        self._others = [each for each in others if each is not checkpoint]
        self._lock = threading.Lock()
        # Faults of files, as far as known, by place and file.
        self._faults: dict[str, str | None] = {}
        self.problems: list[str] = []  # copies that were found damaged, and what was done about it
        self.bytes_read = 0

    def states(self) -> list[RunState]:
        """States of all ranks that saved."""
        content, manifest = self._states_content(), self.checkpoint.manifest
        return [
            RunState(
                epoch=manifest.epoch,
                plan=manifest.plan,
                param_groups=manifest.param_groups,
                common=manifest.common,
                rank=manifest.ranks[rank],
                binary={name: content[offset : offset + size] for name, (offset, size) in places.items()},
            )
            for rank, places in enumerate(manifest.binary)
        ]

    def load(self, pieces: Sequence[TensorPiece]) -> None:
        """Fill the pieces. A box in a file is read once and whole, whatever the pieces need of it."""
        wanted: dict[tuple[str, str, tuple[int, ...]], tuple[ItemRecord, list[tuple[Tensor, tuple[slice, ...]]]]] = {}
        for piece in pieces:
            for file, item in self._sources(piece):
                _, targets = wanted.setdefault((file.name, item.key, item.offsets), (item, []))
                common = piece.box.intersection(item.box)
                assert common is not None
                targets.append((piece.data[piece.box.slices_of(common)], item.box.slices_of(common)))
        with torch.no_grad():
            for (name, *_), (item, targets) in wanted.items():
                values = self._values(name, item)
                for target, part in targets:
                    target.copy_(values[part])

    def damaged(self) -> list[tuple[Copy, str]]:
        """Files that are damaged, as far as names, sizes and reading have shown: where, and their names."""
        copies = self.checkpoint.copies
        return [(copy, name) for copy in copies for name in (*copy.files, STATES) if self._fault(copy, name)]

    def whole(self, name: str, check: FileCheck) -> Copy | None:
        """The nearest copy of a file with this check sum that is not known to be damaged."""
        for copy in self.checkpoint.copies:
            if name == STATES or name in copy.files:
                own = copy.check(name)
                same = (own.bytes, own.crc32) == (check.bytes, check.crc32)
                if same and self._fault(copy, name) is None:
                    return copy
        return None

    def replace(self, bad: Copy, name: str, content: Iterable[memoryview], source: str) -> bool:
        file = bad.full_name(name)
        try:
            bad.place.replace(bad.path(name), content)
        except (OSError, DamagedCopy) as error:
            self.problems.append(f"{file} could not be replaced by that of {source}: {error}")
            return False
        self._faults[file] = None
        self.problems.append(f"{file}: the damaged file was replaced by that of {source}")
        return True

    def _states_content(self) -> bytes:
        for copy in self.checkpoint.copies:
            if self._fault(copy, STATES) is None:
                try:
                    return b"".join(copy.content(STATES))
                except DamagedCopy as error:
                    self._note_fault(copy, STATES, str(error))
        raise self._no_other_copy([str(self._fault(copy, STATES)) for copy in self.checkpoint.copies])

    def _sources(self, piece: TensorPiece) -> list[tuple[FileRecord, ItemRecord]]:
        """Boxes that together have the elements of a piece."""
        if piece.key not in self.checkpoint.items:
            raise CheckpointError(f"the checkpoint of step {self.checkpoint.step} has no {piece.key}")
        saved = self.checkpoint.items[piece.key]
        shape, dtype = self.checkpoint.shapes[piece.key], self.checkpoint.dtypes[piece.key]
        own = str(piece.data.dtype).removeprefix("torch.")
        if shape != tuple(piece.shape) or dtype != own:
            raise ValueError(
                f"{piece.key} was saved as {dtype} {list(shape)}, which cannot be loaded into {own} {list(piece.shape)}"
            )
        copies = self.checkpoint.copies
        nearest = {
            file.name: next(
                (n for n, copy in enumerate(copies) if file.name in copy.files and not self._fault(copy, file.name)),
                len(copies),
            )
            for file, _ in saved
        }

        def preference(each: tuple[FileRecord, ItemRecord]) -> tuple[int, int]:
            """Nearest places first; of files in the same place, those that hold most of the box."""
            common = piece.box.intersection(each[1].box)
            return nearest[each[0].name], -(common.numel if common else 0)

        saved = sorted(saved, key=preference)
        parts, left = cover(piece.box, [item.box for _, item in saved])
        if left:
            raise CheckpointError(
                f"the checkpoint of step {self.checkpoint.step} lacks elements {left[0].offsets} to +{left[0].sizes} "
                f"of {piece.key}"
            )
        return [saved[index] for index in sorted({index for index, _ in parts})]

    def _values(self, name: str, item: ItemRecord) -> Tensor:
        """The elements of a box, from the nearest whole copy of the file: ``[item.sizes]``."""
        copies = self.checkpoint.copies_of(name)
        for copy in copies:
            if self._fault(copy, name) is not None:
                continue
            record = next(each for each in copy.files[name].items if (each.key, each.box) == (item.key, item.box))
            try:
                content = copy.item(name, record)
            except DamagedCopy as error:
                self._note_fault(copy, name, str(error))
                continue
            with self._lock:
                self.bytes_read += item.bytes
            return torch.frombuffer(content, dtype=getattr(torch, item.dtype)).view(item.sizes)
        reasons = [str(self._fault(copy, name)) for copy in copies]
        nowhere = f"{name} of step {self.checkpoint.step} is in none of the given places"
        raise self._no_other_copy(reasons or [nowhere])

    def _fault(self, copy: Copy, name: str) -> str | None:
        where = copy.full_name(name)
        with self._lock:
            if where not in self._faults:
                self._faults[where] = copy.fault(name)
                self.problems += filter(None, [self._faults[where]])
            return self._faults[where]

    def _note_fault(self, copy: Copy, name: str, fault: str) -> None:
        with self._lock:
            self._faults[copy.full_name(name)] = fault
            self.problems.append(fault)

    def _no_other_copy(self, reasons: Sequence[str]) -> CheckpointError:
        whole = [
            f"the checkpoint of step {each.step} is complete: load that" for each in self._others if not each.faults()
        ]
        advice = whole[:1] or ["no other checkpoint is complete"] * bool(self._others)
        return CheckpointError("; ".join([*reasons, "there is no other copy", *advice]))


MODEL = ("param.", "buffer.")  # beginnings of the keys of tensors that belong to the model, not to the optimizer


def export(folder: Path, out: Path, step: int | None = None, shard_bytes: int | None = None) -> tuple[int, int, int]:
    """Write parameters and buffers, by their names in the model of one process; returns the step, their number, and
    the number of files. What is larger than ``shard_bytes`` is written in Hugging Face's layout: files of at most this
    size (or one tensor), ``model-00001-of-00003.safetensors`` for ``model.safetensors``, and an index."""
    if out.suffix not in (".safetensors", ".pt"):
        raise ValueError(f"cannot tell the format of {out}: end its name in .safetensors or .pt")
    if shard_bytes is not None and out.suffix == ".pt":
        raise ValueError(f"{out} cannot have several shards; end its name in .safetensors")
    search = find_checkpoints([Place(folder)])
    checkpoint = search.newest() if step is None else search.of_step(step)
    keys = {
        key.removeprefix(start): key
        for key in sorted(checkpoint.shapes)
        if (start := next((each for each in MODEL if key.startswith(each)), None)) is not None
    }
    if not keys:
        raise CheckpointError(f"the checkpoint of step {checkpoint.step} in {folder} has no parameters")
    types = {name: getattr(torch, checkpoint.dtypes[key]) for name, key in keys.items()}
    sizes = {name: prod(checkpoint.shapes[key]) * types[name].itemsize for name, key in keys.items()}
    shards = _shards(sizes, shard_bytes)
    names = [out.name]
    index = out.with_name(f"{out.name}.index.json")
    if len(shards) > 1:
        if out.exists():
            raise ValueError(
                f"{out} exists, and would be loaded in place of the shards; remove it, or give another --out"
            )
        names = [f"{out.stem}-{number:05}-of-{len(shards):05}{out.suffix}" for number in range(1, len(shards) + 1)]
        # Until all shards are new, there is no index that joins old and new ones.
        index.unlink(missing_ok=True)
    reader = CheckpointReader(checkpoint, search.checkpoints)
    for file, shard in zip(names, shards, strict=True):
        pieces = []
        for key, kind in ((keys[name], types[name]) for name in shard):
            shape = checkpoint.shapes[key]
            pieces.append(TensorPiece("", key, shape, whole(shape), torch.empty(shape, dtype=kind), ""))
        reader.load(pieces)
        _save(dict(zip(shard, (piece.data for piece in pieces), strict=True)), out.with_name(file))
    if len(shards) > 1:
        files = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json({"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}, index)
    return checkpoint.step, len(keys), len(names)


def _shards(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if limit is not None and shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _save(state: Mapping[str, Tensor], out: Path) -> None:
    with replacing(out) as temporary:
        if out.suffix == ".pt":
            torch.save(dict(state), temporary)
        else:
            from safetensors.torch import save_file

            save_file(dict(state), temporary, metadata={"format": "pt"})
