"""Train on nodes that die and come, all of them on this machine, and compare with training that is not disturbed.

    python examples/elastic/demo.py

starts four nodes, kills one (kill -9), and starts another, while they train a vision transformer with ``train.py``.
Then one process trains the same in plain PyTorch. ``--help`` lists the flags.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.options import UsageError
from examples.elastic.options import ElasticOptions, check_options, parse_demo_options, script_flags

SCRIPT = Path(__file__).with_name("train.py")
POLL_SECONDS = 0.1


class JobFailed(Exception):
    """The job ended without a result."""


def main() -> int:
    """Run the demonstration; the exit status."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        options = parse_demo_options()
        check_options(options)
        from examples.common.images import find_data

        find_data(options, options.global_batch, "--global-batch")
        demonstrate(options)
    except UsageError as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except JobFailed as error:
        print(f"demo.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    return 0


def demonstrate(options: ElasticOptions, quiet: bool = False) -> dict[str, Any]:
    """Train on the nodes and undisturbed, and report; the summary.

    Raises:
        JobFailed: a node has failed.
    """
    from examples.elastic.reference import Undisturbed, make_files
    from examples.elastic.report import ElasticReport

    with tempfile.TemporaryDirectory(prefix="elastic_") as name, ElasticReport(options, quiet) as report:
        folder = Path(name)
        for part in ("trace", "output", "checkpoints"):
            (folder / part).mkdir()
        begin = time.monotonic()
        make_files(options, folder / "cluster.toml", folder / "profile.json")
        report.line(f"Layers measured in one process ({time.monotonic() - begin:.1f} s)")
        undisturbed = Undisturbed(options)
        history = run_job(options, folder, undisturbed.steps_per_epoch * options.epochs, report)
        return report.finish(history, compare(options, folder, history, undisturbed, report))


def run_job(options: ElasticOptions, folder: Path, steps: int, report: Any) -> Any:
    """Train on the nodes, do to them what the options say, and return what has happened."""
    from examples.elastic.loop_trace import TraceReader
    from examples.elastic.nodes import Nodes
    from examples.elastic.report import History

    files = ("--cluster", folder / "cluster.toml", "--profile", folder / "profile.json")
    folders = ("--checkpoints", folder / "checkpoints", "--trace", folder / "trace")
    script = [str(part) for part in (SCRIPT, *files, *folders, *script_flags(options))]
    history, trace, pending, shown = (
        History(options.actions),
        TraceReader(folder / "trace"),
        list(options.actions),
        [],
    )
    with Nodes(script, folder / "output") as nodes:
        report.line(f"{len(options.first_nodes)} nodes start: {', '.join(options.first_nodes)}")
        for node in options.first_nodes:
            nodes.start(node)
        report.begin("elastic", steps)
        while not history.finished:
            time.sleep(POLL_SECONDS)
            restarts = len(history.restarts)
            history.add(trace.new())
            for step in history.restarts[restarts:]:
                shown = [change for change in shown if change.step < step]
                report.line(f"No member is left that holds some layer: all start again after step {step}")
            report.progress(history.newest_step, f"{history.members or 'no'} members")
            complete = history.nodes.issuperset(options.first_nodes)
            for action in [action for action in pending if complete and action.step <= history.newest_step]:
                pending.remove(action)
                do = {"kill": nodes.kill, "leave": nodes.warn, "join": nodes.start}[action.kind]
                do(action.node)
                words = {"kill": "killed (kill -9)", "leave": "warned (SIGTERM)", "join": "started"}[action.kind]
                report.line(f"step {history.newest_step}: {action.node} {words}")
            for change in history.changes()[len(shown) :]:
                shown.append(change)
                report.line(
                    f"step {change.step}: {change.before} → {change.after} members, {change.why}: {change.plan}"
                )
            for node, status in nodes.failed().items():
                last = "\n".join(nodes.output(node).read_text(errors="replace").splitlines()[-20:])
                raise JobFailed(f"{node} ended with status {status}; its last lines:\n{last}")
        report.end()
    history.add(trace.new())
    return history


def compare(options: ElasticOptions, folder: Path, history: Any, undisturbed: Any, report: Any) -> Any:
    """Train undisturbed, and compare losses and parameters."""
    import copy

    import torch

    from colossal_hetero.checkpoint.reader import export
    from examples.elastic.reference import accuracy
    from examples.elastic.report import Comparison

    report.begin("undisturbed", undisturbed.steps_per_epoch * options.epochs)
    expected = {}
    for step, loss in enumerate(undisturbed.losses(), 1):
        expected[step] = loss
        report.progress(step, "1 process")
    report.end()
    found = history.losses()
    export(folder / "checkpoints", folder / "model.pt")
    trained = copy.deepcopy(undisturbed.model)
    trained.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    pairs = zip(trained.parameters(), undisturbed.model.parameters(), strict=True)
    return Comparison(
        loss_difference=max(abs(loss - expected[step]) for step, loss in found.items()),
        losses_compared=len(found),
        parameter_difference=max(float((one - other).abs().max()) for one, other in pairs),
        accuracy=accuracy(options, trained),
        undisturbed_accuracy=accuracy(options, undisturbed.model),
    )


if __name__ == "__main__":
    sys.exit(main())
