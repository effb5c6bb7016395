"""The order of passes in Colossal-AI's zero-bubble schedule, from the graph that Colossal-AI itself makes.

``PipelineGraph.get_v_schedule()`` orders the passes for stages that are all alike, from the times of one chunk's
passes. The plugin runs the same nodes (``scheduler_nodes``), so a plan has these times. Unequal stages run this order
as well: a pass starts when the passes that it needs are done.

`[Note: one file of Colossal-AI]`  The graph's file needs nothing but the standard library, but importing it as part of
its package also imports torch, which takes seconds, and planning needs no torch. So that one file is loaded on its own.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ...io.quantities import Seconds
from ...io.schema import FilePart
from ...io.text import count
from .pass_order import Pass, PassKind, PassOrder, stages_of_chunks, why_not_schedulable

__all__ = ["GraphSeconds", "zero_bubble_nodes", "zero_bubble_v"]

KINDS: dict[str, PassKind] = {"F": "forward", "B": "backward", "W": "weight"}


class GraphSeconds(FilePart):
    """The times of one chunk and one micro-batch from which the passes are ordered, in seconds."""

    forward: Seconds
    input_gradient: Seconds
    weight_gradient: Seconds
    transfer: Seconds
    """From a stage to the next, one way."""


@lru_cache(maxsize=64)
def zero_bubble_v(stages: int, micro_batches: int, seconds: GraphSeconds) -> PassOrder:
    """The passes of :func:`zero_bubble_nodes`.

    Raises:
        ValueError: As :func:`zero_bubble_nodes`.
    """
    numbers = [(stage, 2 * stages - 1 - stage) for stage in range(stages)]
    passes = tuple(
        tuple(Pass(KINDS[node.type], numbers[stage][node.chunk], node.minibatch) for node in row if node.type in KINDS)
        for stage, row in enumerate(zero_bubble_nodes(stages, micro_batches, seconds))
    )
    return PassOrder(stages_of_chunks("zbv", stages, 2), passes)


def zero_bubble_nodes(stages: int, micro_batches: int, seconds: GraphSeconds) -> list[list[Any]]:
    """By stage: the passes and messages in the order in which Colossal-AI runs them, its ``scheduler_nodes``.

    Activations count as kept until the pass for the gradients of the weights; the graph keeps those of at most 2p
    passes of a chunk in a stage.

    Raises:
        ValueError: The number of micro-batches is not a multiple of the number of stages, p; or Colossal-AI finds no
            order.
    """
    problem = why_not_schedulable("zbv", stages, micro_batches)
    if problem is not None:
        raise ValueError(f"{count(micro_batches, 'micro-batch')} for {count(stages, 'stage')}: {problem}")
    graph = _module().PipelineGraph(
        n_stage=stages,
        n_micro=micro_batches,
        f_cost=seconds.forward,
        b_cost=seconds.input_gradient,
        w_cost=seconds.weight_gradient,
        c_cost=seconds.transfer,
        f_mem=1,
        b_mem=0,
        w_mem=-1,
    )
    try:
        return cast("list[list[Any]]", graph.get_v_schedule())
    except AssertionError:
        raise ValueError(
            f"Colossal-AI finds no zero-bubble order for {stages} stages and {micro_batches} micro-batches with the "
            f"times {seconds.model_dump()}; use other times or another schedule"
        ) from None


@lru_cache(maxsize=1)
def _module() -> ModuleType:
    """Colossal-AI's ``v_schedule``; see Note: one file of Colossal-AI."""
    name = "colossalai.pipeline.schedule.v_schedule"
    if name in sys.modules:
        return sys.modules[name]
    package = importlib.util.find_spec("colossalai")
    if package is None or not package.submodule_search_locations:
        raise ImportError("zero-bubble plans need Colossal-AI, which is not installed: pip install colossalai")
    path = Path(package.submodule_search_locations[0], "pipeline", "schedule", "v_schedule.py")
    # Under a name of its own, so that Colossal-AI later imports it as part of its package.
    spec = importlib.util.spec_from_file_location("colossalai_v_schedule", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their module by its name.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
