"""The part of a plugin that saves layer checkpoints and resumes from them, and its methods for users."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

from colossalai.checkpoint_io import CheckpointIO
from torch import nn

from ..checkpoint.config import CheckpointConfig
from ..checkpoint.layer_checkpoint import LayerCheckpoint, Start
from ..checkpoint.model_outline import ModelOutline, outline_of
from ..checkpoint.run_states import Training
from .training_objects import TrainingObjects


class Checkpoints:
    """Notes what a model is before it is divided, and saves and loads it afterwards."""

    def __init__(
        self,
        config: CheckpointConfig,
        weights_changed: Callable[[], None] = lambda: None,
        is_broken: Callable[[], bool] | None = None,
        ordinary_shards: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._save_every = config.save_every
        self.files = LayerCheckpoint(config, is_broken)
        self._weights_changed = weights_changed
        self._ordinary_shards = ordinary_shards
        self._outlines: WeakKeyDictionary[nn.Module, ModelOutline] = WeakKeyDictionary()

    def note(self, objects: TrainingObjects) -> None:
        self._outline = outline_of(objects.model, objects.optimizer)

    def attach(self, plugin: Any, objects: TrainingObjects) -> None:
        self._outlines[objects.model] = self._outline

    def adopt(self, model: nn.Module) -> None:
        """Take a model for the one that was configured last."""
        self._outlines[model] = self._outline

    def save(self, training: Training, step: int, epoch: int, plan: str, always: bool = False) -> bool:
        """See :meth:`CheckpointMethods.save`; with ``always``, whatever ``save_every`` is."""
        if step % self._save_every and not always:
            return False
        with self._ordinary_shards():
            return self.files.save(training, step=step, epoch=epoch, plan=plan)

    def resume(self, training: Training, step: int | None) -> Start:
        with self._ordinary_shards():
            start = self.files.resume(training, step)
        self._weights_changed()
        return start

    def training(self, model: Any, optimizer: Any, lr_scheduler: Any, dataloader: Any) -> Training:
        if model not in self._outlines:
            words = "the model is not one that booster.boost returned together with an optimizer"
            raise ValueError(f"{words}; boost it first, with this plugin")
        return Training(model, optimizer, lr_scheduler, dataloader, self._outlines[model])


class PresentCheckpointIO:
    """Forwards to the checkpoint IO that the plugin has when a method is called. ``Booster`` asks the plugin only once,
    but a ZeRO stage that is chosen in ``boost``, and another world of an elastic run, have another one."""

    def __init__(self, present: Callable[[], CheckpointIO]) -> None:
        self._present = present

    def __getattr__(self, name: str) -> Any:
        if name == "_present" or name.startswith("__"):  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._present(), name)


CheckpointIO.register(PresentCheckpointIO)


class CheckpointMethods:
    """Methods by which users save and resume, in both plugins."""

    _checkpoints: Checkpoints | None = None

    def _plan_in_words(self) -> str:
        raise NotImplementedError

    def save(
        self, model: Any, optimizer: Any, lr_scheduler: Any = None, dataloader: Any = None, *, step: int, epoch: int = 0
    ) -> bool:
        """Save a layer checkpoint if ``step`` is a multiple of ``save_every``; returns True if it is saved. Every rank
        calls it after every step. Training goes on as soon as the tensors are copied to the host's memory; they are
        written meanwhile."""
        checkpoints = self._needed()
        training = checkpoints.training(model, optimizer, lr_scheduler, dataloader)
        return checkpoints.save(training, step, epoch, self._plan_in_words())

    def resume(
        self, model: Any, optimizer: Any, lr_scheduler: Any = None, dataloader: Any = None, *, step: int | None = None
    ) -> Start:
        """Load the newest whole checkpoint; returns where training continues: step 0 and epoch 0 if there is none yet.
        Every rank calls it once, after ``booster.boost``. The run that saved it may have had another plan, other
        degrees of parallelism, another ZeRO stage or number of ranks. Each rank reads what it needs from the nearest
        place: its node's disk, other nodes, the shared folder."""
        checkpoints = self._needed()
        return checkpoints.resume(checkpoints.training(model, optimizer, lr_scheduler, dataloader), step)

    def wait_for_saves(self) -> None:
        """Wait until the last checkpoint is written, and raise its error if there was one. Call it before the script
        ends. In elastic training, a save that loses a rank is given up without an error."""
        self._needed().files.wait()

    def give_up_saves(self) -> None:
        """Give up saves, because other ranks have ended; then the end of this process waits for nothing."""
        if self._checkpoints is not None:
            self._checkpoints.files.give_up()

    def _needed(self) -> Checkpoints:
        if self._checkpoints is None:
            raise ValueError(
                "there is no folder for layer checkpoints; make the plugin with "
                "checkpoints=CheckpointConfig(local=..., shared=...)"
            )
        return self._checkpoints
