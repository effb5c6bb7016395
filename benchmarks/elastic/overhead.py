"""What elastic training costs while nothing happens: an iteration with it against one without it.

    python -m benchmarks.elastic.overhead [--rounds 15] [--iterations 10]

Two processes train a small GPT-2, each a replica. With elastic training, a thread tells the store that the process
lives, the message before each step carries two more numbers, and random numbers are seeded before each block and each
sample. All this is switched in turns in the same processes: without it, the thread pauses, the message is the plain
one, and nothing is seeded. The control is the way without it once more. Aim: at most 1.01.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from colossalai.booster import Booster

from benchmarks.common import describe_machine, print_table
from colossal_hetero import ElasticConfig, HeteroHybridParallelPlugin, PlanConfig
from colossal_hetero.data_parallel import sampler
from colossal_hetero.elastic.membership import Monitor
from colossal_hetero.plugin.replicas import replica_gradients
from tests.parallel.plugin.unequal.test_unequal_replicas import loss_of
from tests.support import elastic_jobs

WAYS = ("off", "off, again", "on")


@contextmanager
def switched_off(plugin: Any, optimizer: Any, pause: list[bool]) -> Iterator[None]:
    """In the block, the message before a step is the plain one, nothing is seeded, and the thread does nothing."""

    def plain(*arguments: Any) -> replica_gradients.Commit:
        plugin._elastic._commit = replica_gradients.exchange(*arguments)
        return plugin._elastic._commit

    unseeded = SimpleNamespace(run=lambda seed_of: nullcontext())
    pause[0] = True
    with (
        patch.object(optimizer.gradients, "exchange", plain),
        patch.object(plugin._elastic, "_random", unseeded),
        patch.multiple(sampler, _seed=lambda seed: None, _random_states_kept=nullcontext),
    ):
        yield
    pause[0] = False


def measure(rounds: int, iterations: int, told: Any) -> None:
    pause = [False]
    beat = Monitor._run

    def run(monitor: Monitor) -> None:
        wait = monitor._stopped.wait

        def waiting(seconds: float) -> bool:
            while pause[0] and not wait(seconds):
                pass
            return wait(seconds)

        with patch.object(monitor._stopped, "wait", waiting):
            beat(monitor)

    patch.object(Monitor, "_run", run).start()
    planning = PlanConfig(
        cluster=elastic_jobs.cluster(), profile=elastic_jobs.profile(), global_batch_size=elastic_jobs.GLOBAL_BATCH
    )
    plugin = HeteroHybridParallelPlugin(
        plan="auto", planning=planning, elastic=ElasticConfig(dead_seconds=60.0), precision="fp32"
    )
    model = elastic_jobs.gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = plugin.prepare_dataloader(elastic_jobs.Texts())
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, _ = booster.boost(model, optimizer, dataloader=loader)
    plugin.resume(model, optimizer, None, loader)
    batches = endless(loader)
    times: dict[str, list[float]] = {way: [] for way in WAYS}

    def iterate() -> None:
        booster.execute_pipeline(next(batches), model, loss_of, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()

    def seconds() -> float:
        iterate()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            iterate()
        return (time.perf_counter() - begin) / iterations

    for number in range(rounds + 1):
        for way in WAYS:
            if way == "on":
                found = seconds()
            else:
                with switched_off(plugin, optimizer, pause):
                    found = seconds()
            if number:
                times[way].append(found)
    told.put(("times", {way: median(each) for way, each in times.items()}))
    plugin.finish()


def endless(loader: Any) -> Iterator[Any]:
    epoch = 0
    while True:
        loader.set_epoch(epoch)
        yield from loader.rest_of_epoch()
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=10, help="iterations in a turn (default: %(default)s)")
    arguments = parser.parse_args()
    found: dict[str, float] = {}
    with elastic_jobs.Job(0, script=(measure, arguments.rounds, arguments.iterations)) as job:
        for node in ("big-0", "big-1"):
            job.start(node)
        while job.alive():
            message = job.message()
            if message is not None and message[1] == "times":
                found = message[2][0]
        for error in job.finish().errors:
            print(error)
    print(describe_machine())
    rows = [(way, f"{found[way] * 1000:.2f}", f"{found[way] / found['off']:.3f}") for way in WAYS]
    print_table("Elastic training while nothing happens; aim: ≤ 1.01", ["elastic", "iteration [ms]", "ratio"], rows)


if __name__ == "__main__":
    main()
