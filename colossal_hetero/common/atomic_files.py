"""Files that are complete or as they were, and the folder of caches; needs nothing but the standard library."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPEN_FILES = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/")
"""Files that the process has open already: if they are regular files, others may be writing to them too."""


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """The path of a temporary file beside ``path``, which replaces it when the block ends; not if the block raises.

    Of a symbolic link, the target is replaced. A device or a pipe, such as ``/dev/stdout``, is written to instead.
    """
    path = Path(path)
    if _is_stream(path):
        with tempfile.TemporaryDirectory() as folder:
            temporary = Path(folder) / path.name
            yield temporary
            with temporary.open("rb") as content, path.open("ab") as stream:
                shutil.copyfileobj(content, stream)
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield temporary
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path | str) -> None:
    path = Path(path)
    is_stream = _is_stream(path)
    target = path if is_stream else Path(os.path.realpath(path))
    if target.is_dir():
        raise ValueError(f"cannot write {path}: it is a folder; give the name of a file")
    if target.exists() and not os.access(target, os.W_OK):
        raise ValueError(f"cannot write {path}: no permission to change this file")
    if is_stream:
        return
    if not target.parent.is_dir():
        folder = target.parent if path.is_symlink() else path.parent
        raise ValueError(f"cannot write {path}: there is no folder {folder}")
    # Root passes the check of permissions also where a file system is read-only or has no files, such as /proc.
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:40]}."):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {path}: no file can be made in {target.parent}: {error.strerror}") from None


def _is_stream(path: Path) -> bool:
    """True if bytes are written to ``path``, but it is not a file that can be replaced."""
    if str(path).startswith(OPEN_FILES):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()
