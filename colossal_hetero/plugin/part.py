"""A part of a plugin: one feature that is added to a plugin of Colossal-AI, with the same moments for all features."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["PluginPart", "TrainingObjects"]

DEFAULT_EPOCH_LENGTH = 100
"""Iterations that count as an epoch if the length of the data loader is unknown."""


class TrainingObjects(NamedTuple):
    """The objects that ``Plugin.configure`` takes and returns, in its order."""

    model: Any
    """``nn.Module``; a ``ModelWrapper`` once it is configured."""
    optimizer: Any
    """``Optimizer``, an ``OptimizerWrapper`` once it is configured; None if the model is not trained."""
    criterion: Any
    """Loss function, or None."""
    dataloader: Any
    """``DataLoader`` to train with, or None."""
    lr_scheduler: Any
    """Learning-rate schedule, or None."""

    @property
    def iterations_per_epoch(self) -> int:
        """Batches of the data loader; :data:`DEFAULT_EPOCH_LENGTH` if it has no length or there is none."""
        try:
            return max(1, len(self.dataloader))
        except TypeError:
            return DEFAULT_EPOCH_LENGTH


class PluginPart:
    """One feature of a plugin. ``Plugin.configure`` calls its moments in the order in which they are defined here.

    A plugin with several parts goes through all of them at each moment, in the order of its tuple of parts, before the
    next moment begins. Moments that a part does not define do nothing.
    """

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        """Check and replace what the user gave to ``booster.boost``, before Colossal-AI configures it."""
        return objects

    def change_model(self, plugin: Any, objects: TrainingObjects) -> None:
        """Change the configured model, before anything runs."""

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        """Run trial passes on the configured objects. No part has attached anything to them yet, so that trials are
        not counted as iterations. Only called if there is an optimizer."""

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        """Attach to the configured objects what runs in every iteration. A part wraps the functions that the parts
        before it have wrapped. Only called if there is an optimizer."""
