"""Many members die, join and leave while a model trains; the result is that of one process that nothing happens to.

    python -m benchmarks.elastic.soak [--kills 100] [--steps 700] [--seed 0] [--zero]

Members are processes with a node each: two that can hold a small GPT-2 alone, and three of which two are needed. So
plans have replicas of unequal depth. Every event is one of these: a member ends with SIGKILL, at a random moment or in
a phase that is chosen at random (in passes or sums, before or after the commit, while it saves, while a world forms,
while state moves); a member is warned with SIGTERM; a process joins. An event comes two steps after the one before at
the earliest, because two members may be the last holders of a layer. With ``--zero`` all five nodes can hold the model,
plans have three replicas, and each third of the optimizer's state is on two members. Training is in fp64, with AdamW,
clipping, a learning-rate schedule, and a layer checkpoint of every third step. Aim: it ends, and parameters differ by
at most 1e-8 from those of one process; no process and no unfinished file is left, and the last checkpoint is whole.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.common import print_table, read_options
from tests.support.elastic_jobs import BIG_NODES, NODES, PHASES, Job, cluster, undisturbed

AIM = 1e-8
CHANGES = ("re-forming", "formed", "moving", "moved")
GATHERING = ("gathering", "gathered")  # with ZeRO only
TRAINING = tuple(phase for phase in PHASES if phase not in (*CHANGES, *GATHERING, "evaluation"))
ZERO = dict(zero_stage=1, topology=cluster(BIG_NODES), min_replicas=3)


def event(job: Job, chance: random.Random, dies: bool, zero: bool) -> list[str]:
    """Let something happen to the job; returns what, which is empty if nothing can.

    Args:
        job: that runs.
        chance: random numbers.
        dies: whether members may be killed.
        zero: whether the job trains with ZeRO.
    """
    there = {job.nodes[number]: number for number in job.alive()}
    away = [node for node in (BIG_NODES if zero else NODES) if node not in there]
    bigs = sum(node.startswith("big") for node in there)
    # Somebody who holds the whole model must stay.
    victims = [node for node in there if bigs > 1 or node.startswith("small")] if len(there) > 3 else []
    kinds = [*(["join"] * 4 if away else []), *(["warn"] if victims else [])]
    if dies and victims:
        kinds += ["at random", "in training", *(["in a change"] * 2 if away else ["in training"])]
    if not kinds:
        return []
    kind = chance.choice(kinds)
    if kind == "join":
        job.start(chance.choice(away))
        return [kind]
    number = there[chance.choice(victims)]
    if kind in ("warn", "at random"):
        time.sleep(chance.uniform(0.0, 0.3))
        getattr(job.members[number], "terminate" if kind == "warn" else "kill")()
        job.members[number].join(30)  # a warned member leaves after the running step
        return ["warn" if kind == "warn" else "kill at random"]
    phase = chance.choice(CHANGES if kind == "in a change" else TRAINING + GATHERING * zero)
    job.doom(number, phase)
    happened = []
    if kind == "in a change":
        job.start(chance.choice(away))
        happened = ["join"]
    job.members[number].join(30)
    if job.members[number].is_alive():  # a member that has nothing to save, for example
        job.members[number].kill()
        phase = f"at random, not {phase}"
    return [*happened, f"kill {phase}"]


def soak(kills: int, steps: int, seed: int, folder: Path, zero: bool = False) -> tuple[Counter[str], Job]:
    """Run the job.

    Args:
        kills: number of members that are killed.
        steps: optimizer steps.
        seed: of the events.
        folder: for checkpoints, and for what members are told.
        zero: train with ZeRO, on nodes that can all hold the model.
    """
    chance, happened = random.Random(seed), Counter[str]()
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    dooms = folder / "dooms"
    dooms.mkdir()
    with Job(steps, folder=folder / "checkpoints", dooms=dooms, **(ZERO if zero else {})) as job:
        for node in (BIG_NODES if zero else NODES)[:4]:
            job.start(node)
        version, following = 0, 3
        while job.alive():
            message = job.message()
            if message is None or message[1] != "step":
                continue
            version = max(version, message[2][0])
            killed = sum(number for kind, number in happened.items() if kind.startswith("kill"))
            if not following <= version < steps - 10:
                continue
            kinds = event(job, chance, killed < kills, zero)
            happened.update(kinds)
            if kinds:
                print(f"step {version}: {', '.join(kinds)}", flush=True)
            while (message := job.message(seconds=0)) is not None:  # of steps before the event
                if message[1] == "step":
                    version = max(version, message[2][0])
            # Not before the step after the next: what two members hold may be lost if both end in one change.
            following = version + chance.choice((2, 2, 3))
        job.finish()
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in children]
    print(f"processes left behind: {sum(child.name() == 'python' and child.is_running() for child in left[2:])}")
    return happened, job


def check_folder(folder: Path) -> bool:
    """Print whether the checkpoints are whole, and what else is there; returns whether all is well."""
    unfinished = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    print(f"unfinished files left behind: {', '.join(unfinished) or 'none'}")
    command = [sys.executable, "-m", "colossal_hetero.cli.main", "checkpoint", "verify", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True)
    print(result.stdout.strip() or result.stderr.strip())
    return not unfinished and result.returncode == 0


def main() -> None:
    arguments = read_options(__doc__, kills=100, steps=700, seed=0, zero=False)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        happened, job = soak(arguments.kills, arguments.steps, arguments.seed, Path(folder), arguments.zero)
        check_folder(Path(folder) / "checkpoints")
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
    phases = {kind.removeprefix("kill "): number for kind, number in sorted(happened.items()) if "kill" in kind}
    kills = sum(phases.values())
    print_table("kills by phase", list(phases), [tuple(phases.values())])
    print_table(
        f"{arguments.steps} steps, {time.monotonic() - begin:.0f} s; aim: difference ≤ {AIM}",
        ["kills", "joins", "warned", "finished", "errors", "steps done", "largest difference",
         "after a kill [s]", "planned [s]"],
        [
            (
                kills, happened["join"], happened["warn"], len(outcome.parameters), len(outcome.errors),
                len(outcome.losses), f"{max(differences, default=float('nan')):.1e}",
                *(f"{median(each):.2f} (max. {max(each):.2f})" if each else "–" for each in (lost, planned)),
            )
        ],
    )  # fmt: skip
    for error in outcome.errors:
        print(error)


if __name__ == "__main__":
    main()
