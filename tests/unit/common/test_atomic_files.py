"""Files that are replaced at once, links that stay, and devices that are written to."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from colossal_hetero.common.atomic_files import check_writable, replacing


def write(path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text("new")


def test_a_file_is_replaced_and_keeps_its_mode_and_after_an_error_it_is_as_before(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")
    path.chmod(0o640)
    with pytest.raises(KeyError), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["plan.json"]
    write(path)
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["plan.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_links_and_devices_stay(tmp_path: Path, exists: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    link, target = tmp_path / "link.json", folder / "plan.json"
    if exists:
        target.write_text("old")
    link.symlink_to(Path("folder") / "plan.json")
    for path in (link, Path("/dev/null")):
        check_writable(path)
        write(path)
    assert link.is_symlink() and target.read_text() == "new"
    assert os.listdir(folder) == ["plan.json"]
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_standard_output_can_be_written_to_a_file_or_a_pipe(tmp_path: Path) -> None:
    code = (
        "from colossal_hetero.common.atomic_files import replacing\n"
        "print('before', flush=True)\n"
        "with replacing('/dev/stdout') as path: path.write_text('content\\n')\n"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "before\ncontent\n"
    with (tmp_path / "output").open("a") as output:
        subprocess.run(command, stdout=output, check=True)
    assert (tmp_path / "output").read_text() == "before\ncontent\n"
