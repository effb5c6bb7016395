"""Many members die, join and leave while a model trains; the result is that of one process that nothing happens to.

    python -m benchmarks.elastic.soak [--events 100] [--steps 300] [--seed 0]

Members are processes with a node each: two that can hold a small GPT-2 alone, and three of which two are needed. So
plans have replicas of unequal depth. Every event is one of these: a member is ended with SIGKILL at a random moment, in
whatever it does then; a member is warned with SIGTERM; a process joins. An event comes two steps after the one before
at the earliest, because two members may be the last holders of a layer. A kill may hit the change for a process that
joins. Training is in fp64, with AdamW, clipping and a learning-rate schedule. Aim: it ends, and parameters differ by at
most 1e-8 from those of one process.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter
from statistics import median

import psutil
import torch

from benchmarks.common import describe_machine, print_table
from tests.support.elastic_jobs import NODES, Job, undisturbed

AIM = 1e-8


def event(job: Job, chance: random.Random) -> str | None:
    """Let something happen to the job; returns what, or None if nothing can."""
    there = {job.nodes[number]: number for number in job.alive()}
    away = [node for node in NODES if node not in there]
    bigs = sum(node.startswith("big") for node in there)
    # Somebody who holds the whole model must stay.
    victims = [node for node in there if bigs > 1 or node.startswith("small")]
    kinds = [*(["join"] * 2 if away else []), *(["kill", "kill", "warn"] if len(there) > 3 and victims else [])]
    if not kinds:
        return None
    kind = chance.choice(kinds)
    if kind == "join":
        job.start(chance.choice(away))
        return kind
    victim = job.members[there[chance.choice(victims)]]
    time.sleep(chance.uniform(0.0, 0.3))
    if kind == "kill":
        victim.kill()
    else:
        victim.terminate()
    victim.join(30)  # a warned member leaves after the running step
    return kind


def soak(events: int, steps: int, seed: int) -> tuple[Counter[str], Job]:
    chance, happened = random.Random(seed), Counter[str]()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    with Job(steps) as job:
        for node in NODES[:4]:
            job.start(node)
        version, following = 0, 3
        while job.alive():
            message = job.message()
            if message is None or message[1] != "step":
                continue
            version = max(version, message[2][0])
            if version < following or happened.total() == events:
                continue
            kind = event(job, chance)
            if kind is not None:
                happened[kind] += 1
                print(f"step {version}: {kind}", flush=True)
            for _ in range(job.pending()):  # of steps before the event
                message = job.message()
                if message is not None and message[1] == "step":
                    version = max(version, message[2][0])
            spacing = (steps - version) / (events + 1 - happened.total())
            # Not before the step after the next: what two members hold may be lost if both end in one change.
            following = version + max(2, round(chance.uniform(0.5, 1.5) * spacing))
        job.finish()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in children]
    print(f"processes left behind: {sum(child.name() == 'python' and child.is_running() for child in left[2:])}")
    return happened, job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100, help="kills, joins and warnings (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random events (default: %(default)s)")
    arguments = parser.parse_args()
    begin = time.monotonic()
    happened, job = soak(arguments.events, arguments.steps, arguments.seed)
    outcome = job.outcome
    _, expected = undisturbed(arguments.steps)
    differences = [
        float((torch.from_numpy(found)[: len(reference)] - reference).abs().max())
        for parameters in outcome.parameters
        for name, found in parameters.items()
        for reference in [expected.get(name, expected["transformer.wte.weight"])]
    ]
    changes = [each for of_member in outcome.recoveries for each in of_member]
    lost = [each.seconds for each in changes if "joins or leaves" not in each.reason]
    planned = [each.seconds for each in changes if "joins or leaves" in each.reason]
    print(describe_machine())
    print_table(
        f"{arguments.steps} steps, {time.monotonic() - begin:.0f} s; aim: difference ≤ {AIM}",
        ["kills", "joins", "warned", "finished", "errors", "steps done", "largest difference",
         "after a kill [s]", "planned [s]"],
        [
            (
                happened["kill"], happened["join"], happened["warn"], len(outcome.parameters), len(outcome.errors),
                len(outcome.losses), f"{max(differences, default=float('nan')):.1e}",
                f"{median(lost or [0.0]):.2f} (max. {max(lost, default=0.0):.2f})",
                f"{median(planned or [0.0]):.2f} (max. {max(planned, default=0.0):.2f})",
            )
        ],
    )  # fmt: skip
    for error in outcome.errors:
        print(error)


if __name__ == "__main__":
    main()
