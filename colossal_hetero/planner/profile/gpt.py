"""A GPT by its sizes: parameters, floating-point operations and activation memory, without building it.

Parameters and operations after Holmes, Eq. 5 and 6, which are those of Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM" (2021), Eq. 2 and 3; activation memory after Korthikanti et
al., "Reducing activation recomputation in large transformer models" (2022), sections 4.1 to 5. Only matrix products
count as operations, so FLOP are a lower bound, and a tight one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Recompute", "Transformer"]

Recompute = Literal["none", "selective", "full"]
"""What of a block's forward pass runs again during backward instead of being kept: nothing, the inside of attention
(whose operations are not counted, as they are few), or all of it."""

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer whose MLP is four times as wide as its hidden state, with tied embeddings.

    Raises:
        ValueError: a size below 1, or a hidden size that the heads do not divide.
    """

    layers: int
    hidden: int
    vocabulary: int
    sequence: int
    """Tokens per sample."""
    heads: int

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "vocabulary", "sequence", "heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number, at least 1")
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}")

    @property
    def embedding_parameters(self) -> int:
        """Words and positions."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def block_parameters(self) -> int:
        """Attention and MLP with their biases, and two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Those of the logits. They are the words of the embedding, counted once in :attr:`parameters`; a last stage
        apart from the first holds a copy."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Of the whole model: ``P = 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h))`` (Holmes, Eq. 5)."""
        return self.layers * self.block_parameters + self.embedding_parameters

    @property
    def block_forward_flop(self) -> int:
        """Of one sample in one block: ``24 s h² + 4 s² h``."""
        return 24 * self.sequence * self.hidden**2 + 4 * self.sequence**2 * self.hidden

    @property
    def head_forward_flop(self) -> int:
        """Of one sample in the logits: ``2 s h V``."""
        return 2 * self.sequence * self.hidden * self.vocabulary

    def block_backward_flop(self, recompute: bool = True) -> int:
        """Of one sample in one block: twice forward, and forward again if its activations are recomputed."""
        return (3 if recompute else 2) * self.block_forward_flop

    def flop_per_iteration(self, batch: int, recompute: bool = True) -> int:
        """Forward and backward of ``batch`` samples.

        With recomputation ``F = 96 B s l h² (1 + s/(6 h) + V/(16 l h))`` (Holmes, Eq. 6). The head is not recomputed.

        Raises:
            ValueError: ``batch`` is below 1.
        """
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 sample")
        block = self.block_forward_flop + self.block_backward_flop(recompute)
        return batch * (self.layers * block + 3 * self.head_forward_flop)

    def block_activation_bytes(
        self, tensor_parallel: int = 1, recompute: Recompute = "none", sequence_parallel: bool = False
    ) -> float:
        """What one sample keeps for backward in one block, per device, in half precision.

        ``s h (10 + 24/t + 5 a s/(h t))``; without the last term if the inside of attention is recomputed (or never
        kept, as with flash attention); ``2 s h`` if all is. Sequence parallelism divides all of it by ``t``.
        (Korthikanti et al. 2022, Table 2.)

        Raises:
            ValueError: heads are no multiple of ``tensor_parallel``, or ``recompute`` is unknown.
        """
        if recompute not in RECOMPUTE:
            raise ValueError(f"recompute={recompute!r}: choose one of {', '.join(RECOMPUTE)}")
        if tensor_parallel < 1 or self.heads % tensor_parallel:
            raise ValueError(f"tensor_parallel={tensor_parallel} does not divide heads={self.heads}")
        row = self.sequence * self.hidden
        if recompute == "full":
            return 2.0 * row / (tensor_parallel if sequence_parallel else 1)
        replicated = 10.0 / (tensor_parallel if sequence_parallel else 1)
        attention = 5.0 * self.heads * self.sequence / self.hidden if recompute == "none" else 0.0
        return row * (replicated + (24.0 + attention) / tensor_parallel)

    @property
    def embedding_activation_bytes(self) -> int:
        """The mask of the dropout, of one sample: ``s h`` (Korthikanti et al. 2022, section 4.3)."""
        return self.sequence * self.hidden

    def head_activation_bytes(self, tensor_parallel: int = 1) -> float:
        """Final norm, input of the logits, and logits in single precision, of one sample: ``4 s h (1 + V/(h t))``."""
        return 4.0 * self.sequence * (self.hidden + self.vocabulary / tensor_parallel)

    @property
    def output_bytes(self) -> int:
        """What one sample sends from block to block in half precision: ``2 s h``."""
        return 2 * self.sequence * self.hidden
