"""Division of a plan's shares into whole units: ranges of a layer's units that move from rank to rank. A *unit* is the
smallest part that can be pruned or given away: a contraction column, a hidden neuron, a head. Units are divided in
*grains* of several units, because matrix products are faster for round sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .plan import BalancePlan, Traffic, Volume

GRAIN = 64  # maximum number of units that are pruned or migrated together: matrix products are faster for round sizes
GRAINS = 32  # minimum number of grains per rank, so that rounding to a grain changes at most 3 % of its work


@dataclass(frozen=True)
class Move:
    """The receiver computes the sender's units ``[start, stop)``."""

    sender: int
    receiver: int
    start: int
    stop: int

    @property
    def units(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Division:
    """Assignment of the units of one layer or block to ranks."""

    units: int  # the number of units that each rank holds
    pruned: tuple[int, ...]  # the number of units that each rank prunes, of those that it does not give away
    moves: tuple[Move, ...]
    """Units that are given away, by sender and then ascending: the last units of each sender, without gaps."""

    def given(self, rank: int) -> int:
        """The number of units that the rank gives away: its last ones."""
        return sum(move.units for move in self.moves if move.sender == rank)

    def taken(self, rank: int) -> int:
        """The number of other ranks' units that the rank computes."""
        return sum(move.units for move in self.moves if move.receiver == rank)

    def kept(self, rank: int) -> int:
        """The number of its own units that the rank computes, at least one."""
        return self.units - self.given(rank) - self.pruned[rank]


def effective_grain(units: int, grain: int = GRAIN) -> int:
    """The largest power of two that is at most ``grain`` and with at least 32 grains in ``units``; else 1."""
    return 1 << (max(min(grain, units // GRAINS), 1).bit_length() - 1)


def divide(units: int, plan: BalancePlan, grain: int = GRAIN) -> Division:
    """The plan's shares in whole units, for a layer or block with ``units`` units per rank. A rank keeps a multiple of
    the :func:`effective_grain`, at least one grain, unless it keeps everything. Giving away is rounded to the grains
    for which sender and receivers finish closest to each other. Receivers take units in proportion to the plan, in
    whole grains by largest remainder; one of them also takes what is left. They are numbered as in SEMI, Sec. IV-B:
    ``r' = (r + e − s) mod e`` for receiver ``r`` and first sender ``s``, and get ranges in that order, so that two
    ranks exchange at most one."""
    if units < 1 or grain < 1:
        raise ValueError(f"units={units} and grain={grain} must be at least 1")
    ranks = len(plan.resize)
    grain = effective_grain(units, grain)
    pruned = [_pruned_units(units, share, grain) for share in plan.resize]
    receivers = [rank for rank in range(ranks) if plan.receive[rank] > 0]
    given = [0] * ranks
    for rank in range(ranks):
        if plan.migrate[rank] > 0 and receivers:
            receivers_load = math.fsum(plan.load(receiver) for receiver in receivers) / len(receivers)
            given[rank] = _given_units(
                units - pruned[rank], plan.migrate[rank] * units, grain, plan.load(rank), receivers_load
            )
    renumbered = _renumbered(given)
    receivers = [rank for rank in renumbered if plan.receive[rank] > 0]
    taken = _apportion(sum(given), [plan.receive[rank] for rank in receivers], grain)
    return Division(units, tuple(pruned), _moves(units, given, dict(zip(receivers, taken, strict=True)), renumbered))


def divide_counts(units: int, counts: Sequence[int]) -> Division:
    """The division in which each rank computes that many units and nothing is pruned; ``units`` is a full share."""
    assert sum(counts) == units * len(counts) and min(counts) > 0, f"{counts} of {units} units per rank"
    given = [max(0, units - count) for count in counts]
    renumbered = _renumbered(given)
    taken = {rank: counts[rank] - units for rank in renumbered if counts[rank] > units}
    return Division(units, (0,) * len(counts), _moves(units, given, taken, renumbered))


def _renumbered(given: Sequence[int]) -> list[int]:
    first = next((rank for rank, count in enumerate(given) if count), 0)
    return [(first + offset) % len(given) for offset in range(len(given))]


def _moves(units: int, given: Sequence[int], taken: dict[int, int], order: Sequence[int]) -> tuple[Move, ...]:
    moves = []
    left = dict(taken)
    for sender in order:
        start = units - given[sender]
        for receiver in taken:
            count = min(left[receiver], units - start)
            if count:
                moves.append(Move(sender, receiver, start, start + count))
                left[receiver] -= count
                start += count
    return tuple(moves)


def _pruned_units(units: int, share: float, grain: int) -> int:
    if share == 0.0:
        return 0
    return units - min(max(grain * round((units - share * units) / grain), grain), units)


def _given_units(available: int, wanted: float, grain: int, load: float, receivers_load: float) -> int:
    """Number of ``available`` units to give away if ``wanted`` would be exact; a multiple of the grain remains, or all.
    Under the plan all ranks finish together, so the times per unit are in the inverse ratio of the loads."""
    keep = max(available - wanted, 0.0) / grain
    grains = math.floor(keep + 1e-9)
    if (keep - grains) * load > (1.0 - (keep - grains)) * receivers_load:
        grains += 1
    return available - min(max(grains, 1) * grain, available)


def _apportion(total: int, weights: Sequence[float], grain: int) -> list[int]:
    """``total`` units in proportion to the weights: whole grains by largest remainder, ties to the first."""
    if not total:
        return [0] * len(weights)
    whole = math.fsum(weights)
    grains, odd = divmod(total, grain)
    exact = [grains * weight / whole for weight in weights]
    assigned = [math.floor(share + 1e-9) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: (-round(exact[i] - assigned[i], 9), i))
    for i in by_remainder[: grains - sum(assigned)]:
        assigned[i] += 1
    taken = [grain * count for count in assigned]
    if odd:
        taken[max(range(len(weights)), key=lambda i: (round(total * weights[i] / whole - taken[i], 9), -i))] += odd
    return taken


# Amount that a migration sends, by formula (docs/algorithms.md, 1.4 and 1.5): tests compare it with counts, the
# pre-test computes times from it. Columns are sent one message after the other. Units of blocks travel between many
# pairs of ranks at the same time, so the rank that waits for most counts.


@dataclass(frozen=True)
class BlockShape:
    elements_per_unit: int  # the number of weights and biases of one unit in all layers
    layers: int


def column_traffic(
    moves: Sequence[Move],
    outputs: int,
    rows: int,
    passes: int,
    ranks: int,
    bytes_per_element: int,
    *,
    column_parallel: bool,
    method: str,
) -> Traffic:
    """The whole group's traffic for a layer in an iteration of ``passes`` micro-batches of ``rows`` rows each."""

    def sent(messages: int, elements: int) -> Volume:
        return Volume(messages * passes, elements * passes * bytes_per_element)

    broadcast, reduce, direct = Volume(), Volume(), Volume()
    n, others = outputs, ranks - 1
    for sender in sorted({move.sender for move in moves}):
        parts = [move.units for move in moves if move.sender == sender]
        c, q = sum(parts), len(parts)
        if method == "broadcast-reduce":
            broadcast += sent(others, others * n * c)
            if column_parallel:
                reduce += sent(others, others * rows * n)
                broadcast += sent(others, others * rows * n)
            else:
                broadcast += sent(others, others * rows * c)
                direct += sent(q, rows * c)
            direct += sent(q, n * c)
        else:
            direct += sent(2 * q, 2 * n * c) + sent(q, rows * c)
            if column_parallel:
                direct += sent(2 * q, 2 * q * rows * n)
            else:
                direct += sent(q, rows * c) + sent(q, q * rows * n)
    return Traffic(point_to_point=direct, broadcast=broadcast, reduce=reduce)


@dataclass(frozen=True)
class Port:
    sent: Volume
    waited: Volume
    """Sent or received while it can compute nothing: its first bucket of weights (others arrive while the bucket before
    computes), and gradients, which return layer by layer. Messages that start together count once."""


def block_ports(
    blocks: Sequence[BlockShape],
    moves: Sequence[Sequence[Move]],
    buckets: Sequence[int],
    ranks: int,
    bytes_per_element: int,
) -> list[Port]:
    """Messages of all blocks in a forward and a backward pass, by rank; ``buckets`` has each block's bucket. Weights
    are sent in one message per bucket and pair of ranks, gradients in one per layer, sender and receiver."""
    ports = []
    for rank in range(ranks):
        weight_messages: set[tuple[int, int]] = set()
        first: int | None = None
        sent = waited = Volume()
        for block, moved, bucket in zip(blocks, moves, buckets, strict=True):
            bytes_per_unit = block.elements_per_unit * bytes_per_element
            given = [move for move in moved if move.sender == rank]
            taken = [move for move in moved if move.receiver == rank]
            if not given and not taken:
                continue
            weight_messages.update((bucket, move.receiver) for move in given)
            first = bucket if first is None else first
            given_bytes, taken_bytes = (bytes_per_unit * sum(move.units for move in each) for each in (given, taken))
            sent += Volume(block.layers * len(taken), given_bytes + taken_bytes)
            waited += Volume(block.layers, given_bytes + taken_bytes)
            if bucket == first:
                waited += Volume(0, given_bytes + taken_bytes)
        ports.append(
            Port(sent=sent + Volume(len(weight_messages), 0), waited=waited if first is None else waited + Volume(1, 0))
        )
    return ports


def busiest_port(ports: Sequence[Port]) -> Volume:
    """The messages and the bytes that the ranks wait for; all ranks wait for the one that has the most."""
    return Volume(max(port.waited.messages for port in ports), max(port.waited.bytes for port in ports))
