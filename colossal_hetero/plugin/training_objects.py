"""The objects that a plugin configures, and the check of its options."""

from typing import Any, NamedTuple

DEFAULT_EPOCH_LENGTH = 100  # iterations that count as an epoch if the length of the data loader is unknown


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


def check_option(name: str, value: object, kind: type, example: str) -> None:
    if value is not None and not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{name}={value!r} is not {article} {kind.__name__}; write {kind.__name__}({example})")
