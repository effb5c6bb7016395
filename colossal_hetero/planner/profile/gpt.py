"""Parameters, floating-point operations and activation memory of a GPT, computed from its sizes.

Parameters and operations after Holmes, Eq. 5 and 6, which are those of Narayanan et al., "Efficient large-scale
language model training on GPU clusters using Megatron-LM" (2021), Eq. 2 and 3; activation memory after Korthikanti et
al., "Reducing activation recomputation in large transformer models" (2022), sections 4.1 to 5. Only matrix products
are counted as operations, so FLOP are a tight lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Recompute", "Transformer"]

Recompute = Literal["none", "selective", "full"]
"""What of a block's forward pass is run again during backward instead of being kept: nothing, the inside of attention
(few operations, which are not counted), or all of it."""

RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Transformer:
    """A decoder-only transformer whose MLP is four times as wide as its hidden state, with tied embeddings.

    Raises:
        ValueError: A size is below 1, or the hidden size is not a multiple of the heads.
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
        """Parameters of the word and position embeddings."""
        return (self.vocabulary + self.sequence) * self.hidden

    @property
    def block_parameters(self) -> int:
        """Parameters of a block: attention and MLP with their biases, and two layer norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the logits. They are those of the word embedding and counted once in :attr:`parameters`. If the
        last stage is not the first, it holds a copy."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model: ``P = 12 l h² (1 + 13/(12 h) + (V + s)/(12 l h))`` (Holmes, Eq. 5)."""
        return self.layers * self.block_parameters + self.embedding_parameters

    @property
    def block_forward_flop(self) -> int:
        """FLOP of one sample in one block, forward: ``24 s h² + 4 s² h``."""
        return 24 * self.sequence * self.hidden**2 + 4 * self.sequence**2 * self.hidden

    @property
    def head_forward_flop(self) -> int:
        """FLOP of one sample in the logits, forward: ``2 s h V``."""
        return 2 * self.sequence * self.hidden * self.vocabulary

    def block_backward_flop(self, recompute: bool = True) -> int:
        """FLOP of one sample in one block, backward: twice forward, and forward again if activations are recomputed."""
        return (3 if recompute else 2) * self.block_forward_flop

    def flop_per_iteration(self, batch: int, recompute: bool = True) -> int:
        """FLOP of forward and backward of ``batch`` samples.

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
        """Bytes that one sample keeps for backward in one block, per device, in half precision.

        ``s h (10 + 24/t + 5 a s/(h t))``. Without the last term if the inside of attention is recomputed (or never
        kept, as with flash attention). ``2 s h`` if the whole block is recomputed. Sequence
        parallelism divides all of it by ``t``.
        (Korthikanti et al. 2022, Table 2.)

        Raises:
            ValueError: The heads are not a multiple of ``tensor_parallel``, or ``recompute`` is unknown.
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
        """Bytes of the dropout mask of one sample: ``s h`` (Korthikanti et al. 2022, section 4.3)."""
        return self.sequence * self.hidden

    def head_activation_bytes(self, tensor_parallel: int = 1) -> float:
        """Bytes of one sample in the head: ``4 s h (1 + V/(h t))``.

        These are the final norm, the input of the logits, and the logits in single precision.
        """
        return 4.0 * self.sequence * (self.hidden + self.vocabulary / tensor_parallel)

    @property
    def output_bytes(self) -> int:
        """Bytes that one sample sends from block to block, in half precision: ``2 s h``."""
        return 2 * self.sequence * self.hidden
