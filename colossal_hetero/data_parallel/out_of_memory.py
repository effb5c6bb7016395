"""Out-of-memory errors in training, of a micro-batch whose size ran before training.

[Note: out of memory in training] Other ranks count on the samples of a micro-batch, so it cannot be made smaller. If
forward runs out of memory and does not communicate, it is repeated with its saved tensors outside the device's memory,
as later ones of that size are at once; the result is the same. A backward pass has released parts of its graph, and
others may wait in its collectives: this rank raises an error. Both say how the next run uses smaller micro-batches.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import Tensor, nn

from ..common.methods import wrap_method
from ..common.text import print_words
from ..profiling.local_collectives import local_collectives
from ..profiling.memory import is_out_of_memory, recover
from ..profiling.preserved_state import random_state
from .loader import HeteroDataLoader

MIN_BYTES = 1 << 16  # smaller tensors stay in place


@contextmanager
def stored_outside(model: nn.Module) -> Iterator[None]:
    """In the block, autograd saves tensors, except those of ``model`` itself, in the host's memory (GPU) or in files
    (CPU). The results are the same, bit for bit, but passes take longer."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        small = tensor.numel() * tensor.element_size() < MIN_BYTES
        if small or tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() in own:
            return tensor
        if tensor.device.type != "cpu":
            device, copy = tensor.device, tensor.detach().to("cpu")
            return lambda: copy.to(device)
        file = tempfile.TemporaryFile()  # noqa: SIM115 - closed when autograd releases the function below
        part = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
        torch.save(tensor.detach().clone() if part else tensor.detach(), file)
        return functools.partial(_read, file)

    def unpack(packed: Tensor | Callable[[], Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _read(file: Any) -> Tensor:
    file.seek(0)
    return torch.load(file, weights_only=True)


class OutOfMemoryGuard:
    """Handles out-of-memory errors of a model in training; see [Note: out of memory in training]."""

    def __init__(self, loader: HeteroDataLoader, *, may_repeat: bool) -> None:
        self._loader = loader
        self._may_repeat = may_repeat
        self._outside_from: int | None = None

    def attach(self, model: ModelWrapper, optimizer: OptimizerWrapper) -> None:
        wrap_method(model, "forward", functools.partial(self._forward, model))
        wrap_method(optimizer, "backward", self._backward)

    def _samples(self) -> int:
        return 0 if self._loader.current is None else self._loader.current.samples

    def _forward(self, model: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if not (model.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        samples = self._samples()
        if self._outside_from is not None and samples >= self._outside_from:
            with stored_outside(model):
                return forward(*args, **kwargs)
        restore_random_state = random_state()
        try:
            return forward(*args, **kwargs)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if not self._may_repeat:
                raise self._failure("forward", samples) from error
            recover(error)
        restore_random_state()
        self._outside_from = samples
        self._tell(samples)
        # Buffers were broadcast before the failed pass, and the other ranks do not repeat that.
        with self._failing("forward"), local_collectives(), stored_outside(model):
            return forward(*args, **kwargs)

    def _backward(self, backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._failing("backward"):
            return backward(*args, **kwargs)

    def _tell(self, samples: int) -> None:
        print_words(
            f"rank {dist.get_rank()} ran out of memory in the forward pass of a micro-batch of {samples} samples. The "
            "pass is repeated with activations outside the device's memory, as will be all of this size; nothing is "
            f"lost, but they take longer. {_for_the_next_run(samples)}"
        )

    @contextmanager
    def _failing(self, phase: str) -> Iterator[None]:
        """In the block, running out of memory cannot be repaired."""
        try:
            yield
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise self._failure(phase, self._samples()) from error

    def _failure(self, phase: str, samples: int) -> RuntimeError:
        current = self._loader.current
        where = "" if current is None else f" of global batch {current.global_batch}"
        return RuntimeError(
            f"rank {dist.get_rank()} ran out of memory in the {phase} pass of a micro-batch of {samples} samples{where}"
            f", and the pass cannot be repeated. {_for_the_next_run(samples)} Start again from a checkpoint"
        )


def _for_the_next_run(samples: int) -> str:
    smaller = max(samples - max(samples // 8, 1), 1)
    return f"For the next run, set max_micro_batch={smaller}, or lower max_batch of this rank in a profile file."
