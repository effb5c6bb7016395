"""A part of a plugin: one feature that is added to a plugin of Colossal-AI, with the same moments for all features."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["PluginPart", "TrainingObjects"]

DEFAULT_EPOCH_LENGTH = 100
"""Iterations that count as an epoch if the length of the data loader is unknown."""


class TrainingObjects(NamedTuple):
    """The objects that ``Plugin.configure`` takes and returns, in its order."""

    model: Any  # ``nn.Module``; a ``ModelWrapper`` once it is configured
    optimizer: Any  # ``Optimizer``; an ``OptimizerWrapper`` once it is configured; None if the model is not trained
    criterion: Any  # loss function, or None
    dataloader: Any  # ``DataLoader`` to train with, or None
    lr_scheduler: Any  # learning-rate schedule, or None

    @property
    def iterations_per_epoch(self) -> int:
        """Batches of the data loader; :data:`DEFAULT_EPOCH_LENGTH` if it has no length or there is none."""
        try:
            return max(1, len(self.dataloader))
        except TypeError:
            return DEFAULT_EPOCH_LENGTH


class PluginPart:
    """One feature of a plugin. ``Plugin.configure`` calls its moments in the order in which they are defined here, each
    on all parts, in the order of the plugin's tuple of parts, before the next one. ``measure`` and ``attach`` are
    called only if there is an optimizer."""

    def before_configure(self, plugin: Any, objects: TrainingObjects) -> TrainingObjects:
        """Check and replace what the user gave to ``booster.boost``, before Colossal-AI configures it."""
        return objects

    def change_model(self, plugin: Any, objects: TrainingObjects) -> None:
        """Change the configured model, before anything runs."""

    def measure(self, plugin: Any, objects: TrainingObjects) -> None:
        """Run trial passes. No part has attached anything yet, so that trials are not counted as iterations."""

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        """Attach what runs in every iteration, around the functions that the parts before this one have wrapped."""
