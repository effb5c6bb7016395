"""Labeled images: found, checked, read into memory, augmented and served in batches."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import Dataset, default_collate

from .options import IMAGE_SIZE, Options, UsageError

MAX_HELD_BYTES = 2**30
"""Size up to which the decoded images of a folder are held in memory, per rank; larger ones are read batch by batch."""

DIGITS_TEST_SHARE = 0.2
DIGITS_IMAGES = (1438, 359)
"""Number of training and of test images in scikit-learn's digits when each class is split at the share above."""

Track = Callable[[Sequence[Any], str], Iterator[Any]]
"""Yields the items, and shows how many have been taken; the text names what is done."""


@dataclass(frozen=True)
class DataInfo:
    """What is known about a data set before it is read."""

    train_images: int
    test_images: int
    classes: int
    name: str = "digits"

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.train_images} images to train on, {self.test_images} held out, {self.classes} classes"
        )


class Pixels(Protocol):
    """Images by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor) -> Tensor:
        """``indices`` int64 ``[B]`` to uint8 ``[B, 3, 32, 32]``."""


@dataclass(frozen=True)
class Augmentation:
    """Random crops of the image with a black border, and mirror images."""

    border: int
    """Pixels added on each side before a crop of the image's size is taken."""
    flip: bool


class ImageSet(Dataset):
    """Images with labels, normalized, in batches, and, for training, augmented.

    An image's crop in an epoch depends on the seed, the epoch and the image, not on the batch or on the rank, so all
    ranks of a tensor-parallel group see the same.
    """

    def __init__(
        self,
        pixels: Pixels,
        labels: Tensor,
        mean: Tensor,
        deviation: Tensor,
        augmentation: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self._pixels = pixels
        self.labels = labels
        self._mean, self._deviation = mean.view(3, 1, 1), deviation.view(3, 1, 1)
        self._augmentation = augmentation
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the crops and mirrorings of an epoch."""
        if self._augmentation is None:
            return
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        border = self._augmentation.border
        self._shifts = torch.randint(0, 2 * border + 1, (len(self), 2), generator=generator)
        self._flips = torch.rand(len(self), generator=generator) < (0.5 if self._augmentation.flip else 0.0)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images float32 ``[B, 3, 32, 32]`` and labels int64 ``[B]``; a ``DataLoader`` calls this for a batch."""
        chosen = torch.as_tensor(indices)
        images = self._pixels[chosen]
        if self._augmentation is not None:
            images = self._augment(images, chosen)
        return (images.float() / 255.0 - self._mean) / self._deviation, self.labels[chosen]

    def _augment(self, images: Tensor, indices: Tensor) -> Tensor:
        assert self._augmentation is not None
        images = pad(images, (self._augmentation.border,) * 4)
        places = torch.arange(IMAGE_SIZE)
        rows = self._shifts[indices, :1] + places
        columns = self._shifts[indices, 1:] + places
        columns = torch.where(self._flips[indices, None], columns.flip(1), columns)
        batch = torch.arange(len(indices))[:, None, None]
        return images[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def whole_batch(batch: Any) -> Any:
    """The ``collate_fn`` of a data loader over an :class:`ImageSet`, which returns whole batches.

    A profiler may take single images out of the set; these are put together as usual.
    """
    return default_collate(batch) if isinstance(batch, list) else batch


def padded_batches(images: ImageSet, batch_size: int, replica: int, replicas: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A replica's share of ``images``, in order, in batches that all have ``batch_size`` images.

    Every image belongs to one replica; all replicas have equally many batches, and all batches are equally large, as a
    pipeline needs them. A batch with too few images is filled with image 0 under the label −1, which no prediction
    equals.
    """
    per_replica = -(-len(images) // replicas)
    of_replica = list(range(len(images)))[replica::replicas]
    for start in range(0, per_replica, batch_size):
        indices = of_replica[start : start + batch_size]
        missing = batch_size - len(indices)
        pixels, labels = images.__getitems__(indices + [0] * missing)
        labels = labels.clone()
        labels[len(indices) :] = -1
        yield pixels, labels


def find_data(options: Options, batch_size: int, batch_flag: str = "--batch-size") -> DataInfo:
    """How much data there is, without reading the images.

    Args:
        options: ``data`` and ``data_dir`` say which data.
        batch_size: images of an iteration.
        batch_flag: the flag that sets ``batch_size``, for the message.

    Raises:
        UsageError: the data is not there, or there is less than one batch of it.
    """
    if options.data == "digits":
        info = _find_digits(options)
    elif options.data == "cifar10":
        info = _find_cifar10(options)
    else:
        info = _find_folder(options)
    if batch_size > info.train_images:
        raise UsageError(
            f"{batch_flag} {batch_size} is more than the {info.train_images} training images of "
            f"--data {options.data}; use at most {info.train_images}"
        )
    return info


def load_data(options: Options, track: Track) -> tuple[ImageSet, ImageSet]:
    """Images to train on and images held out, read into memory where they fit."""
    if options.data == "digits":
        pixels, labels = _read_digits()
        parts = _stratified_split(labels, DIGITS_TEST_SHARE)
        train, test = ((pixels[part], labels[part]) for part in parts)
        augmentation = Augmentation(border=2, flip=False)
    else:
        read = _read_cifar10 if options.data == "cifar10" else _read_folder
        assert options.data_dir is not None
        train, test = (read(options.data_dir, split, track) for split in ("train", "test"))
        augmentation = Augmentation(border=4, flip=True)
    mean, deviation = _statistics(train[0])
    return (
        ImageSet(*train, mean, deviation, augmentation, options.seed),
        ImageSet(*test, mean, deviation),
    )


def _statistics(pixels: Pixels) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation ``[3]`` of the channels, values in [0, 1], over at most 2,000 images."""
    sample = pixels[torch.linspace(0, len(pixels) - 1, min(len(pixels), 2000)).long()].float() / 255.0
    return sample.mean((0, 2, 3)), sample.std((0, 2, 3)).clamp_min(1e-3)


# digits ---------------------------------------------------------------------------------------------------


def _find_digits(options: Options) -> DataInfo:
    if options.data_dir is not None:
        raise UsageError(f"--data-dir {options.data_dir} is not used by --data digits; give --data folder or cifar10")
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("--data digits needs scikit-learn, which is not installed; pip install scikit-learn")
    return DataInfo(*DIGITS_IMAGES, classes=10)


def _read_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None] * (255.0 / 16.0)
    large = interpolate(small, size=(IMAGE_SIZE, IMAGE_SIZE), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).repeat(1, 3, 1, 1), torch.tensor(digits.target, dtype=torch.int64)


def _stratified_split(labels: Tensor, test_share: float) -> tuple[Tensor, Tensor]:
    """Indices of training and held-out images, the same in every run, with each class at its share in both."""
    draw = np.random.default_rng(0)
    train, test = [], []
    for label in labels.unique():
        members = draw.permutation(torch.nonzero(labels == label).flatten().numpy())
        held_out = round(len(members) * test_share)
        test.append(members[:held_out])
        train.append(members[held_out:])
    return tuple(torch.from_numpy(np.sort(np.concatenate(part))) for part in (train, test))  # type: ignore[return-value]


# cifar10 --------------------------------------------------------------------------------------------------


def _find_cifar10(options: Options) -> DataInfo:
    _need_torchvision(options)
    if options.data_dir is None:
        raise UsageError("--data cifar10 needs --data-dir DIR, where torchvision's CIFAR10 was downloaded to")
    if not (options.data_dir / "cifar-10-batches-py").is_dir():
        raise UsageError(
            f"--data-dir {options.data_dir} has no cifar-10-batches-py; download it with python -c "
            f"\"from torchvision.datasets import CIFAR10; CIFAR10('{options.data_dir}', download=True)\""
        )
    return DataInfo(50_000, 10_000, classes=10, name="cifar10")


def _read_cifar10(root: Path, split: str, track: Track) -> tuple[Tensor, Tensor]:
    from torchvision.datasets import CIFAR10

    images = CIFAR10(str(root), train=split == "train")
    return torch.from_numpy(images.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(images.targets)


# folder ---------------------------------------------------------------------------------------------------


class _Files:
    """Image files, decoded when they are read and scaled to the model's size."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, indices: Tensor) -> Tensor:
        return torch.stack([_decode(self._paths[index]) for index in indices.tolist()])


def _decode(path: str) -> Tensor:
    """The middle square of an image, uint8 ``[3, 32, 32]``."""
    from torchvision.datasets.folder import pil_loader
    from torchvision.transforms import functional

    try:
        image = pil_loader(path)
    except OSError as error:
        raise UsageError(f"cannot read the image {path}: {error}") from None
    if image.size != (IMAGE_SIZE, IMAGE_SIZE):
        image = functional.center_crop(functional.resize(image, IMAGE_SIZE), [IMAGE_SIZE, IMAGE_SIZE])
    return functional.pil_to_tensor(image)


def _find_folder(options: Options) -> DataInfo:
    _need_torchvision(options)
    root = options.data_dir
    if root is None:
        raise UsageError("--data folder needs --data-dir DIR, which holds train/CLASS/* and test/CLASS/*")
    if not root.is_dir():
        raise UsageError(f"--data-dir {root} is not a directory; it must hold train/CLASS/* and test/CLASS/*")
    found = {split: _list_folder(root, split) for split in ("train", "test")}
    classes = {split: names for split, (names, _) in found.items()}
    if classes["train"] != classes["test"]:
        differing = ", ".join(sorted(set(classes["train"]) ^ set(classes["test"])))
        raise UsageError(f"--data-dir {root}: train/ and test/ must have the same classes; only one has {differing}")
    if len(classes["train"]) < 2:
        raise UsageError(f"--data-dir {root} has {len(classes['train'])} class; at least two are needed")
    return DataInfo(len(found["train"][1]), len(found["test"][1]), len(classes["train"]), "folder")


def _list_folder(root: Path, split: str) -> tuple[list[str], list[tuple[str, int]]]:
    """Class names, and image files with the number of their class."""
    from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

    folder = root / split
    if not folder.is_dir():
        raise UsageError(f"--data-dir {root} has no {split}/; it must hold train/CLASS/* and test/CLASS/*")
    try:
        names, numbers = find_classes(str(folder))
        return names, make_dataset(str(folder), numbers, extensions=IMG_EXTENSIONS)
    except FileNotFoundError:
        raise UsageError(
            f"--data-dir {root}: {folder} has a class without images, or no class at all; it must hold CLASS/* with "
            f"images ({', '.join(IMG_EXTENSIONS)})"
        ) from None


def _read_folder(root: Path, split: str, track: Track) -> tuple[Pixels, Tensor]:
    _, samples = _list_folder(root, split)
    labels = torch.tensor([label for _, label in samples])
    paths = [path for path, _ in samples]
    if len(paths) * 3 * IMAGE_SIZE**2 > MAX_HELD_BYTES:
        return _Files(paths), labels
    return torch.stack([_decode(path) for path in track(paths, f"Reading {split}")]), labels


def _need_torchvision(options: Options) -> None:
    if importlib.util.find_spec("torchvision") is None:
        raise UsageError(f"--data {options.data} needs torchvision, which is not installed; pip install torchvision")
