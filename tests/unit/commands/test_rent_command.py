"""The command ``colossal-hetero rent``: machines by their price, limits and quotas."""

from __future__ import annotations

from pathlib import Path

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.plan import load_plan
from tests.support.command_line import failure
from tests.unit.commands.test_plan_command import CLUSTER, files, output

__all__ = ["files"]

PRICES = """
[kinds.A100-40]
dollars_per_hour = 3.0

[kinds.V100-16]
dollars_per_hour = 0.5

[[clusters]]"""


def with_prices(cluster: Path) -> None:
    cluster.write_text(CLUSTER.replace("\n[[clusters]]", PRICES, 1))


def test_nodes_are_chosen_by_their_price(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A V100 has a third of the speed for a sixth of the price."""
    with_prices(files[0])
    topology, saved = load_cluster(files[0]), tmp_path / "plan.json"
    arguments = ("rent", *files, "--global-batch", 16, "--samples", 16 * 10**6)
    text = output(*arguments, "--objective", "cost", "--out", saved)
    assert {topology.devices[rank].node for stage in load_plan(saved).rank_order[0] for rank in stage} == {1}
    cheapest = next(line for line in text.splitlines() if line.lstrip().startswith("1 × old"))
    iteration = load_plan(saved).iteration_seconds
    assert f"{1e6 * iteration / 3600:,.1f}" in cheapest  # hours of a million iterations
    assert f"{1e6 * iteration / 3600 * 2 * 0.5:,.2f}" in cheapest  # for two devices
    output(*arguments, "--objective", "time", "--out", saved)
    fastest = load_plan(saved)
    hours = 1e6 * fastest.iteration_seconds / 3600
    assert fastest.iteration_seconds < iteration
    output(*arguments, "--deadline", 1.01 * hours, "--out", saved)
    assert load_plan(saved).iteration_seconds <= 1.01 * fastest.iteration_seconds
    output(*arguments, "--budget", 1.01 * 1e6 * iteration / 3600, "--out", saved)
    assert load_plan(saved).iteration_seconds == iteration
    # Limits that no plan keeps are those of the user.
    line = failure(*arguments, "--deadline", 1)
    assert "no plan takes at most 1 h; the fastest and the cheapest take " in line and " h for $" in line
    assert "no plan takes at most $1; " in failure(*arguments, "--budget", 1)
    assert "no plan takes at most 2 h for $1; " in failure(*arguments, "--budget", 1, "--deadline", 2)


def test_quotas(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A100s are fastest; none may be taken."""
    with_prices(files[0])
    arguments = ("rent", *files, "--global-batch", 16, "--samples", 16 * 10**6, "--objective", "time")
    saved = tmp_path / "plan.json"

    def kinds() -> set[str]:
        return {stage.device for replica in load_plan(saved).replicas for stage in replica.stages}

    output(*arguments, "--at-most", "new=0", "--out", saved)
    assert kinds() == {"V100-16"}
    output(*arguments, "--at-most", "V100-16=0", "--out", saved)
    assert kinds() == {"A100-40"}
    assert "'new' is not a name and a whole number" in failure(*arguments, "--at-most", "new")
    assert "there are no such nodes or devices" in failure(*arguments, "--at-most", "H100=1")


def test_prices_that_are_missing_or_cannot_be_used(files: tuple[Path, Path]) -> None:
    words = failure("rent", *files, "--global-batch", 16, "--objective", "cost")
    assert "the price of new, old is not known" in words and "dollars_per_hour" in words
    with_prices(files[0])
    assert "say with --samples how long that is" in failure("rent", *files, "--global-batch", 16, "--budget", 5)
