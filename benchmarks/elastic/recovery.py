"""From a kill to the next step: elastic training against torchrun, which starts all processes again.

    python -m benchmarks.elastic.recovery [--rounds 3]

Three processes train a small GPT-2 with replicas of unequal depth. One is ended with SIGKILL. "Elastic" is the time
until the others have made another step, with ``dead_seconds=1`` and ``last_call_seconds=0.5``; "torchrun" is the time
until the same script, started again by ``torchrun --max-restarts``, has loaded the layer checkpoint of the last step
and made another one. A warned member gets SIGTERM; its time is the pause of the others. Aims: at most the dead-wait,
the last call and 1.5 s; at least four times as fast as torchrun; a warned leave at most 1.5 s.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common import print_table, read_options
from tests.support.elastic_jobs import NODES, Job

STEPS, AT = 8, 3
WAITS = 1.5
"""Seconds of dead-wait and last call."""


def elastic_seconds(warned: bool) -> float:
    """The longest time between two steps of members that stay, after one was killed or warned."""
    times: list[float] = []
    with Job(60) as job:
        for node in NODES[:3]:
            job.start(node)
        told = 0.0
        while job.alive():
            message = job.message()
            if message is None or message[1] != "step" or message[0] == 1:
                continue
            version = message[2][0]
            times.append(time.monotonic())
            if version == AT and not told:
                told = time.monotonic()
                (job.members[1].terminate if warned else job.members[1].kill)()
            elif version >= AT + 12:
                break
    # A warned member ends after the running step, and the pause is between two later ones.
    return max(after - before for before, after in itertools.pairwise(times) if (after if warned else before) >= told)


def torchrun_seconds() -> float:
    """From the kill until the first step of the processes that were started again."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        command += ["--max-restarts", "1", str(Path(__file__).with_name("restarted_script.py")), folder]
        finished = subprocess.run([*command, str(STEPS), str(AT)], capture_output=True, text=True, timeout=400)
    killed = re.search(r"killed ([\d.]+)", finished.stdout)
    following = re.search(rf"step {AT + 1} ([\d.]+)", finished.stdout)
    if killed is None or following is None:
        raise RuntimeError(finished.stdout + finished.stderr)
    return float(following[1]) - float(killed[1])


def main() -> None:
    rounds = range(read_options(__doc__, rounds=3).rounds)
    killed = [elastic_seconds(warned=False) for _ in rounds]
    warned = [elastic_seconds(warned=True) for _ in rounds]
    restarted = [torchrun_seconds() for _ in rounds]
    print_table(
        f"From a kill to the next step; aims: ≤ {WAITS + 1.5:g} s, torchrun ≥ 4 × elastic, warned ≤ 1.5 s",
        ["elastic, killed [s]", "elastic, warned [s]", "torchrun [s]", "torchrun / elastic"],
        [
            (
                f"{median(killed):.2f} (max. {max(killed):.2f})",
                f"{median(warned):.2f} (max. {max(warned):.2f})",
                f"{median(restarted):.1f}",
                f"{median(restarted) / median(killed):.1f}",
            )
        ],
    )


if __name__ == "__main__":
    main()
