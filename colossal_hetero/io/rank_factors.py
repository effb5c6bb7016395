"""``RANK:FACTOR[,RANK:FACTOR…]``, as options on the command line give a number for some of the ranks."""

from __future__ import annotations

__all__ = ["parse_rank_factors"]


def parse_rank_factors(text: str) -> dict[int, float]:
    """Factors by rank: ``"1:4,3:2.5"`` gives ``{1: 4.0, 3: 2.5}``. Which ranks and factors are valid is not checked.

    Raises:
        ValueError: a part is not RANK:FACTOR, or a rank is given twice.
    """
    factors: dict[int, float] = {}
    for part in text.split(","):
        rank_text, _, factor_text = part.partition(":")
        try:
            rank, factor = int(rank_text), float(factor_text)
        except ValueError:
            raise ValueError(
                f"{part!r} is not RANK:FACTOR; for example, 3:2 means that rank 3 takes twice as long"
            ) from None
        if rank in factors:
            raise ValueError(f"rank {rank} is given twice in {text!r}")
        factors[rank] = factor
    return factors
