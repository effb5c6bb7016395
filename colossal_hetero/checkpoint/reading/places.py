"""Where the files of checkpoints can be read: folders of this machine here, other kinds elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy import uint8
from numpy.typing import NDArray

from ..storage.errors import DamagedCopy
from ..storage.file_operations import FileOperations, write_all
from ..storage.folder_contents import folder_names

__all__ = ["FolderPlace", "Place", "RepairablePlace"]


class Place(Protocol):
    """Holds folders of checkpoints, with the files that a saver wrote.

    A file is named by its folder and its name, e.g. ``step-00000120/manifest.json``.
    """

    @property
    def name(self) -> str:
        """For messages."""

    def folders(self) -> list[str]:
        """Names of the folders of checkpoints. Empty if the place cannot be reached."""

    def size(self, file: str) -> int | None:
        """Of a file, in bytes; None if it is not there or cannot be reached."""

    def read(self, file: str, offsets: NDArray[np.int64], length: int) -> NDArray[uint8]:
        """Parts of a file, one after another: ``[len(offsets) * length]``.

        Args:
            file: the file.
            offsets: where each part starts, in bytes; ascending.
            length: of each part, in bytes.

        Raises:
            DamagedCopy: the file is not there, ends too early, or cannot be read.
        """


@runtime_checkable
class RepairablePlace(Place, Protocol):
    """A place in which a damaged file can be replaced."""

    def replace(self, file: str, content: Iterable[memoryview]) -> None:
        """Write a file; readers see the old one or the complete new one.

        Raises:
            OSError: it cannot be written.
        """


class FolderPlace:
    """A folder on this machine or mounted from another.

    Args:
        folder: holds the folders of checkpoints. It need not be there.
        files: operations on files.
    """

    def __init__(self, folder: Path | str, files: FileOperations | None = None) -> None:
        self._folder = Path(folder)
        self._files = files or FileOperations()

    @property
    def name(self) -> str:
        """The path."""
        return str(self._folder)

    def folders(self) -> list[str]:
        """See :class:`Place`."""
        try:
            return folder_names(self._folder)
        except OSError:
            return []

    def size(self, file: str) -> int | None:
        """See :class:`Place`."""
        try:
            return os.stat(self._folder / file).st_size
        except OSError:
            return None

    def read(self, file: str, offsets: NDArray[np.int64], length: int) -> NDArray[uint8]:
        """See :class:`Place`."""
        content = np.empty(len(offsets) * length, uint8)
        # Not mapped to memory: where a mapped file is cut off or a disk fails, the process would be killed.
        try:
            descriptor = os.open(self._folder / file, os.O_RDONLY)
        except OSError as error:
            raise DamagedCopy(f"{self._folder / file}: {error.strerror}") from None
        try:
            view = content.data
            for index, offset in enumerate(offsets.tolist()):
                self._fill(descriptor, view[index * length : (index + 1) * length], offset, file)
        finally:
            os.close(descriptor)
        return content

    def replace(self, file: str, content: Iterable[memoryview]) -> None:
        """See :class:`RepairablePlace`."""
        path = self._folder / file
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = self._files.create(temporary)
        try:
            for piece in content:
                write_all(self._files, descriptor, piece)
            self._files.sync(descriptor)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            self._files.close(descriptor)
        self._files.rename(temporary, path)

    def _fill(self, descriptor: int, target: memoryview, offset: int, file: str) -> None:
        position = 0
        while position < target.nbytes:
            try:
                count = os.preadv(descriptor, [target[position:]], offset + position)
            except OSError as error:
                raise DamagedCopy(f"{self._folder / file} cannot be read: {error.strerror}") from None
            if count == 0:
                raise DamagedCopy(f"{self._folder / file} ends at byte {offset + position:,}: it was cut off")
            position += count
