"""English text that every Python installation has: the help topics of pydoc, in pieces of equally many bytes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset

BYTES = 256
"""Number of different tokens: a token is a byte."""

HELD_OUT_SHARE = 0.05
"""Share of the text, at its end, that is not trained on."""


class TextPieces(Dataset):
    """Consecutive pieces of a text."""

    def __init__(self, text: bytes, context: int) -> None:
        count = len(text) // context
        self.tokens = torch.tensor(list(text[: count * context]), dtype=torch.int64).view(count, context)
        """int64 ``[pieces, context]``"""

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        """Tokens int64 ``[context]``."""
        return self.tokens[index]


def load_text(context: int) -> tuple[TextPieces, TextPieces]:
    """Pieces of ``context`` bytes to train on, and pieces held out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    held_out = round(len(text) * HELD_OUT_SHARE)
    return TextPieces(text[:-held_out], context), TextPieces(text[-held_out:], context)
