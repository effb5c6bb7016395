"""What the messages of blocks add to an iteration: the busiest rank's messages that nothing hides."""

from __future__ import annotations

from colossal_hetero.balance.divide import BlockShape, Move, block_ports, busiest_port
from colossal_hetero.balance.plan import Volume
from colossal_hetero.balance.pretest import FittedLink


def test_a_port_waits_for_its_first_weights_and_for_all_gradients() -> None:
    blocks = [BlockShape(units=8, elements_per_unit=10, layers=2)] * 3
    # Rank 0 gives 3 units to rank 1 and 1 to rank 2, but in the first block only the latter.
    moves = [(Move(0, 2, 7, 8),), *[(Move(0, 1, 4, 7), Move(0, 2, 7, 8))] * 2]
    ports = block_ports(blocks, moves, [0, 0, 1], ranks=4, bytes_per_element=2)
    assert [port.sent for port in ports] == [Volume(4, 180), Volume(4, 120), Volume(6, 60), Volume()]
    # The weights of the first two blocks are one bucket. Messages to several ranks start together.
    assert [port.waited for port in ports] == [
        Volume(1 + 6, (1 + 4) * 20 + (1 + 4 + 4) * 20),
        Volume(1 + 4, 3 * 20 + 2 * 3 * 20),
        Volume(1 + 6, 2 * 20 + 3 * 20),
        Volume(),
    ]
    assert busiest_port(ports) == Volume(7, 280)
    assert busiest_port(block_ports(blocks, [()] * 3, [0, 0, 0], 4, 2)) == Volume()


def test_a_large_model_is_priced_by_the_wire_of_one_rank() -> None:
    """An MLP like that of Llama 70B on eight ranks, one of which gives a tenth of its units to the seven others."""
    blocks, given = 80, 357
    shape = BlockShape(units=3584, elements_per_unit=3 * 8192, layers=3)
    moved = tuple(Move(0, rank, 3227 + 51 * (rank - 1), 3227 + 51 * rank) for rank in range(1, 8))
    link = FittedLink(latency_seconds=20e-6, seconds_per_byte=1 / 400e9)
    waited = busiest_port(block_ports([shape] * blocks, [moved] * blocks, list(range(blocks)), 8, 2))
    wire = blocks * given * shape.elements_per_unit * 2 / 400e9
    assert wire < link.seconds(waited) < wire * 1.02 + blocks * shape.layers * 20e-6 + 1e-4
    assert link.seconds(waited) < 0.010
