"""The checkpoint IO that forwards to the one that the plugin has at the moment."""

from __future__ import annotations

import copy
from types import SimpleNamespace

from colossalai.checkpoint_io import CheckpointIO

from colossal_hetero.plugin.checkpoint_part import PresentCheckpointIO


def test_methods_and_values_of_the_present_one_are_seen() -> None:
    present = [SimpleNamespace(save_model=lambda path: f"first {path}", use_zero=False, async_writers=[1])]
    forwarding = PresentCheckpointIO(lambda: present[-1])
    save = forwarding.save_model
    assert save("x") == "first x" and forwarding.use_zero is False and forwarding.async_writers == [1]
    present.append(SimpleNamespace(save_model=lambda path: f"second {path}", use_zero=True))
    assert forwarding.save_model("x") == "second x" and forwarding.use_zero is True
    assert not hasattr(forwarding, "async_writers")


def test_it_is_a_checkpoint_io_and_can_be_copied() -> None:
    present = SimpleNamespace(use_zero=True)
    forwarding = PresentCheckpointIO(lambda: present)
    assert isinstance(forwarding, CheckpointIO)
    assert copy.copy(forwarding).use_zero and copy.deepcopy(forwarding).use_zero
