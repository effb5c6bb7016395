"""SEMI's ViT-1B for real: a few iterations on two ranks, one of them slowed, unbalanced and balanced.

python -m benchmarks.papers.vit_1b --out FILE.json [--model vit-1b] [--depth N] [--slowdown 4] [--iterations 8]

Single precision, plain SGD, batches of two images. Each way has processes of its own, so that peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.common import start_ranks
from colossal_hetero.common.files import write_json
from colossal_hetero.planner.profile.estimate import VITS
from examples.common.vit import build_vit

MODES = ("off", "auto")
BATCH, CLASSES = 2, 10


def train(options: argparse.Namespace) -> None:
    """Train one way on this rank; rank 0 writes what was measured."""
    from colossalai.booster import Booster

    from colossal_hetero import BalanceConfig, HeteroHybridParallelPlugin
    from colossal_hetero.testing.stragglers import Stragglers, inject_stragglers

    start_ranks(2)
    balance = BalanceConfig(mode=options.mode)
    booster = Booster(plugin=HeteroHybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32", balance=balance))
    sizes = VITS[options.model]
    torch.manual_seed(1)
    depth = options.depth or sizes.depth
    model = build_vit(CLASSES, hidden=sizes.hidden, depth=depth, heads=sizes.heads, patch=sizes.patch)
    parameters = sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    inject_stragglers(model, optimizer, Stragglers(slowdowns={1: options.slowdown}))
    generator = torch.Generator().manual_seed(2)
    losses, seconds = [], []
    for _ in range(options.iterations):
        images = torch.randn(BATCH, 3, 32, 32, generator=generator)
        labels = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        start = time.perf_counter()
        loss = F.cross_entropy(model(images), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            print(f"{options.mode}: iteration {len(losses)}, loss {losses[-1]:.5f}, {seconds[-1]:.1f} s", flush=True)
    peaks: list[int] = [0, 0]
    dist.all_gather_object(peaks, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    if dist.get_rank() == 0:
        moved = booster.plugin.report().balance
        migrated = max((rank.migrated + rank.resharded for rank in moved.ranks), default=0.0) if moved else 0.0
        found = {"losses": losses, "seconds": seconds, "peak_bytes": peaks, "parameters": parameters}
        write_json(found | {"migrated": migrated}, options.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=VITS, default="vit-1b")
    parser.add_argument("--depth", type=int, help="fewer blocks than the model has")
    parser.add_argument("--slowdown", type=float, default=4.0)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--mode", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode is not None:
        train(options)
        return
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for mode in MODES:
            out = Path(folder, f"{mode}.json")
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--mode", mode, "--out", str(out)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            found[mode] = json.loads(out.read_text())
    write_json(found, options.out)
    off, auto = (found[mode] for mode in MODES)
    largest = max(abs(a - b) / abs(a) for a, b in zip(off["losses"], auto["losses"], strict=True))
    print(
        f"losses differ by at most {largest:.1e}; last iterations", *(median(found[m]["seconds"][-3:]) for m in MODES)
    )


if __name__ == "__main__":
    main()
