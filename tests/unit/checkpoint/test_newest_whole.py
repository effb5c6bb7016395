"""Which of several checkpoints is loaded, if nodes have only parts of them."""

from __future__ import annotations

import pytest

from colossal_hetero.checkpoint.places import NodeCopy, newest_whole

FILES = frozenset({"embedding.whole.safetensors", "block-0000.whole.safetensors"})
FIRST, SECOND = sorted(FILES)


def copy(node: str, step: int, *files: str, run: str = "") -> NodeCopy:
    return NodeCopy(node, f"{run}{step}", step, f"2026-01-01T00:00:{step:02}", frozenset(files), FILES)


def test_the_newest_checkpoint_whose_files_are_all_somewhere_is_loaded() -> None:
    copies = [copy("a", 1, *FILES), copy("a", 2, FIRST), copy("b", 2, SECOND), copy("a", 3, FIRST), copy("b", 3)]
    found, skipped = newest_whole([*copies, *copies])  # two ranks of each node find the same
    assert found == copies[1:3]
    assert skipped == [f"that of step 3 lacks {SECOND} (parts of it are on node a, node b)"]


def test_a_step_can_be_chosen() -> None:
    copies = [copy("a", 1, *FILES), copy("", 2, *FILES), copy("a", 3, FIRST)]
    assert newest_whole(copies, step=1) == (copies[:1], [])
    with pytest.raises(FileNotFoundError, match="there is none of step 4; the steps are: 1, 2, 3"):
        newest_whole(copies, step=4)


def test_parts_of_checkpoints_of_different_runs_are_not_put_together() -> None:
    with pytest.raises(FileNotFoundError, match="no checkpoint is whole: that of step 1 lacks"):
        newest_whole([copy("a", 1, FIRST, run="x"), copy("b", 1, SECOND, run="y")])
    assert newest_whole([]) == ([], [])
