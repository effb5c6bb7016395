"""``colossal-hetero plan``, ``simulate`` and ``rent``: what they print and write, and their errors."""

from pathlib import Path

import pytest

from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.cost.plan import Plan, load_plan, save_plan
from colossal_hetero.planner.cost.simulate import simulate_plan
from colossal_hetero.planner.profile.layer_profile import LayerSizes, ModelProfile, save_profile
from colossal_hetero.planner.report.plan_table import one_line
from tests.support.command_line import failure, run
from tests.support.layer_profiles import layer_times
from tests.support.plans import plan, replica, stage, unequal

CLUSTER = Path(__file__).with_name("cluster.toml").read_text(encoding="utf-8")

LAYERS = 8  # embedding, six blocks, head


def profile(parameter_bytes: int = 10**6, update_seconds: float = 1e-4) -> ModelProfile:
    """A V100 takes three times as long as an A100."""
    bytes_each = dict(activation_bytes=(10**6,) * LAYERS, output_bytes=(10**4,) * LAYERS)
    times = tuple(
        layer_times(kind, (seconds * size,) * LAYERS, micro_batch=size, update_seconds=(update_seconds,) * LAYERS)
        for kind, seconds in {"A100-40": 0.01, "V100-16": 0.03}.items()
        for size in (1, 2, 4)
    )
    sizes = LayerSizes(parameter_bytes=(parameter_bytes,) * LAYERS, **bytes_each)
    return ModelProfile(name="net", precision="bf16", times=times, sizes=(sizes,))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    cluster, layers = tmp_path / "cluster.toml", tmp_path / "profile.json"
    cluster.write_text(CLUSTER)
    save_profile(profile(), layers)
    return cluster, layers


def output(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def planned(files: tuple[Path, Path], batch: int, *options: object) -> tuple[str, Plan]:
    """What the command prints, and the plan that it writes into ``plan.json`` beside the cluster file."""
    out = files[0].with_name("plan.json")
    return output("plan", *files, "--global-batch", batch, *options, "--out", out), load_plan(out)


def test_a_plan_is_printed_and_written_and_says_how_good_it_is(files: tuple[Path, Path], tmp_path: Path) -> None:
    text, made = planned(files, 16)
    out = tmp_path / "plan.json"
    assert (made.model, made.precision, made.cluster, made.profile) == ("net", "bf16", "cluster.toml", "profile.json")
    assert (made.blocks, made.global_batch) == (6, 16)
    assert {rank for each in made.replicas for stage in each.stages for rank in stage.ranks} <= set(range(4))
    assert made.uniform_seconds is not None and made.uniform_seconds >= made.iteration_seconds
    assert one_line(made) in text and "as fast as the best plan with uniform stages" in text
    assert f'plan="{out}", precision="bf16"' in text or "It cannot be run:" in text
    assert sorted(tmp_path.iterdir()) == sorted([*files, out])
    assert max(map(len, text[: text.index(one_line(made))].splitlines())) <= 140
    assert made.bound_seconds is not None and made.gap is not None
    assert made.bound_seconds <= made.iteration_seconds <= made.bound_seconds * (1 + made.gap) * (1 + 1e-9)
    assert f"within {max(made.gap, 0.001):.1%} of the best possible under this model" in text
    _, early = planned(files, 16, "--gap", 1000)
    assert early.gap is not None and early.gap <= 10 and early.iteration_seconds >= made.iteration_seconds
    assert planned(files, 16, "--overlap")[1].bound_seconds is None


def test_plans_of_other_schedules_are_printed_and_simulated(files: tuple[Path, Path], tmp_path: Path) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    text, made = planned(files, 4, "--schedule", "interleaved", "--plot", picture)
    assert made.schedule == "interleaved" and one_line(made) in text
    assert f"schedule interleaved with {made.chunks_per_stage} chunks per stage" in " ".join(text.split())
    start, stop = made.replicas[0].stages[0].block_ranges[1]
    assert f", [{start}, {stop})" in text
    simulated = output("simulate", out, "--plot", tmp_path / "simulated.png")
    assert "as Colossal-AI's schedule interleaved does" in simulated and "formula" not in simulated
    assert picture.stat().st_size > 10_000 and (tmp_path / "simulated.png").stat().st_size > 10_000
    # The best over several schedules is the best of each of them.
    seconds = {
        schedules: planned(files, 4, "--schedule", schedules)[1].iteration_seconds
        for schedules in ("1f1b", "interleaved", "zbv", "all", "zbv,1f1b")
    }
    assert seconds["all"] == min(seconds.values()) and seconds["zbv,1f1b"] == min(seconds["zbv"], seconds["1f1b"])
    slow = output("simulate", out, "--slow", "0:3")
    assert "planned again for these ranks" in slow


def test_the_simulated_time_is_printed_with_the_closed_form_and_with_slow_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    save_plan(unequal(), path)
    text = output("simulate", path)
    assert "iteration time by event simulation:" in text and "by the formula:" in text
    assert "without slow ranks" not in text
    busy = [float(line.split()[-4]) for line in text.splitlines() if "[" in line and "T4" in line and "×" not in line]
    # Four micro-batches, two layers per stage, 10 ms forward and 20 ms backward per layer, and the update.
    assert busy == [pytest.approx(4 * 2 * 0.03 + 0.001, abs=1e-3)] * 3
    save_plan(plan(replica(stage(0, 6, (0,), transfer_seconds=0.0, update_seconds=0.0))), path)
    text = output("simulate", path, "--slow", "0:2.5")
    assert "with rank 0 slowed 2.5 ×" in text and "the iteration takes 2.50 × as long" in text


def test_a_slow_rank_is_planned_again_and_the_plan_is_written(files: tuple[Path, Path], tmp_path: Path) -> None:
    cluster, layers = files
    path, out = tmp_path / "plan.json", tmp_path / "new.json"
    output("plan", *files, "--global-batch", 16, "--out", path)
    # The files are found next to the plan.
    text = output("simulate", path, "--slow", "0:6", "--out", out)
    assert "planned again for these ranks:" in text and "× as fast): tp 1" in text and f"{out}: the new plan" in text
    present = float(text.split(" instead of ")[1].split()[0])
    assert f"iteration time by event simulation: {present:.3f} s" in text
    new = load_plan(out)
    assert new.global_batch == 16 and simulate_plan(new).seconds < present
    assert f"ranks: {simulate_plan(new).seconds:.3f} s instead" in text
    # Both plans in another folder than the files.
    (tmp_path / "other").mkdir()
    moved = tmp_path / "other/plan.json"
    save_plan(load_plan(path), moved)
    assert "with --cluster and --profile also" in output("simulate", moved, "--slow", "0:6")
    assert "no such file" in failure("simulate", moved, "--slow", "0:6", "--out", out)
    again = output("simulate", moved, "--slow", "0:6", "--cluster", cluster, "--profile", layers)
    assert text.split("planned again")[1].splitlines()[0] == again.split("planned again")[1].splitlines()[0]
    assert "no plan is faster than the present one" in output("simulate", path, "--slow", "0:1")


PRICES = """
[kinds.A100-40]
dollars_per_hour = 3.0

[kinds.V100-16]
dollars_per_hour = 0.5

[[clusters]]"""


def test_nodes_are_chosen_by_their_price(files: tuple[Path, Path], tmp_path: Path) -> None:
    """A V100 has a third of the speed for a sixth of the price."""
    files[0].write_text(CLUSTER.replace("\n[[clusters]]", PRICES, 1))
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
    # Quotas: A100s are fastest; none may be taken.
    for quota, kind in (("new=0", "V100-16"), ("V100-16=0", "A100-40")):
        output(*arguments, "--objective", "time", "--at-most", quota, "--out", saved)
        assert {stage.device for replica in load_plan(saved).replicas for stage in replica.stages} == {kind}
