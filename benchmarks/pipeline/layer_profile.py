"""Compare the time of stages of n blocks with the prediction from the layer profile, at several CPU quotas.

python -m benchmarks.pipeline.layer_profile [--quotas 1 0.5 0.25] [--seconds 4]      (quotas below 1 need root)

Each quota has a process with one thread. It profiles a vision transformer, then runs single stages: forward and
backward passes of micro-batches, gradients added up. The table shows the errors of two predictions: n times the time of
one block, which planning uses, and the sum of measured runs of consecutive blocks (AutoHet, Eq. 5). The last column
shows by how much a block in a run of n blocks takes longer than an average block, so it is 0 if times are additive.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from benchmarks.common import print_table
from colossal_hetero.planner.profile.layer_profile import BlockRun
from colossal_hetero.profiling.layer_passes import LayerPasses, clock
from colossal_hetero.profiling.layer_profiler import profile_layers
from colossal_hetero.profiling.model_layers import find_block_row
from colossal_hetero.testing.stragglers import cpu_quota
from tests.support.layer_profiles import times_of

MODEL = partial(
    VisionTransformer,
    img_size=32,
    patch_size=4,
    embed_dim=256,
    depth=12,
    num_heads=4,
    num_classes=10,
    class_token=False,
    global_pool="avg",
)
MICRO_BATCH = 4
STAGES = (1, 2, 3, 5, 7, 9, 11, 12)


def measure(seconds: float) -> dict[str, Any]:
    """Profile the model, then time its stages in turn for ``seconds`` each. Returns times, predictions and errors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODEL()
    batch = torch.randn(MICRO_BATCH, 3, 32, 32), torch.arange(MICRO_BATCH)
    profile = profile_layers(model, batch, F.cross_entropy, micro_batches=[MICRO_BATCH]).profile
    times = times_of(profile, "cpu", 1, MICRO_BATCH)
    costs = profile.costs("cpu", 1, MICRO_BATCH)
    passes = LayerPasses(model, find_block_row(model), F.cross_entropy, batch)

    def whole() -> None:
        F.cross_entropy(model(batch[0]), batch[1]).backward()

    calls = [*(partial(passes.run, 0, count) for count in STAGES), whole]
    *stages, whole_seconds = in_turn(calls, seconds)
    block = times.forward_seconds[1] + times.backward_seconds[1]
    return {
        "stages": dict(zip(STAGES, stages, strict=True)),
        "block": {count: count * block for count in STAGES},
        "composed": {count: composed_seconds(times.block_runs, count) for count in STAGES},
        "runs": {run.blocks: seconds_of(run) / run.blocks / block - 1 for run in times.block_runs},
        "whole": (float(costs.forward_seconds.sum() + costs.backward_seconds.sum()), whole_seconds),
    }


def seconds_of(run: BlockRun) -> float:
    return run.forward_seconds + run.backward_seconds


def composed_seconds(runs: Sequence[BlockRun], blocks: int) -> float:
    """Seconds of forward and backward of ``blocks`` blocks: ``T(n) = Σ α_i T(2^i)`` (AutoHet, Eq. 5)."""
    left, seconds = blocks, 0.0
    for run in reversed(runs):
        count, left = divmod(left, run.blocks)
        seconds += count * seconds_of(run)
    return seconds


def in_turn(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Mean wall time of each call in seconds. Rounds of all calls are repeated for ``seconds`` times their number.

    Each round has another order, so that the pauses of a CPU quota affect all calls equally.
    """
    for call in calls:
        call()
    spent, rounds, order = [0.0] * len(calls), 0, random.Random(0)
    while sum(spent) < seconds * len(calls):
        for index in order.sample(range(len(calls)), len(calls)):
            start = clock()
            calls[index]()
            spent[index] += (clock() - start).wall
        rounds += 1
    return [each / rounds for each in spent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quotas", type=float, nargs="+", default=[1.0, 0.5, 0.25], help="shares of a CPU core")
    parser.add_argument("--seconds", type=float, default=4.0, help="time per stage (default: 4)")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child is not None:
        with cpu_quota(arguments.child) if arguments.child < 1 else nullcontext():
            print(json.dumps(measure(arguments.seconds)))
        return
    rows = []
    for quota in arguments.quotas:
        command = [sys.executable, "-m", __spec__.name, "--child", str(quota), "--seconds", str(arguments.seconds)]
        result = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
        for count in map(str, STAGES):
            took = result["stages"][count]
            rows.append([f"{quota:g}", count, f"{took * 1e3:.1f}", *error(result, count, took)])
        predicted, took = result["whole"]
        rows.append([f"{quota:g}", "whole model", f"{took * 1e3:.1f}", f"{predicted / took - 1:+.1%}", "", ""])
    print_table(
        "Error of the predicted time of stages",
        ["quota", "blocks", "measured [ms]", "n × one block", "sum of runs (Eq. 5)", "block in a run of n"],
        rows,
    )


def error(result: dict[str, Any], count: str, took: float) -> list[str]:
    """The last three cells of a row: errors of both predictions, and how much longer a block in a run takes."""
    run = result["runs"].get(count)
    return [
        f"{result['block'][count] / took - 1:+.1%}",
        f"{result['composed'][count] / took - 1:+.1%}",
        "" if run is None else f"{run:+.1%}",
    ]


if __name__ == "__main__":
    main()
