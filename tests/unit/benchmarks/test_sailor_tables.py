"""Published tables of real GPUs, and predictions of plans that others measured."""

from pathlib import Path
from statistics import mean, median

import pytest

from benchmarks.planner.predicted_plans import load_measured_plans, predict
from benchmarks.planner.published_clusters import read_published
from benchmarks.planner.sailor_tables import (
    import_bandwidths,
    make_topology,
    profile_part,
    read_gpu_tables,
)
from colossal_hetero.planner.cluster.cluster_file import load_cluster
from colossal_hetero.planner.profile.layer_profile import load_profile
from tests.support.layer_profiles import times_of
from tests.support.paths import REPOSITORY

REAL_TABLES = REPOSITORY.parent / "shared" / "data" / "gpu-profiles"
"""The published tables; tests that need them are skipped where they are missing."""
LAYERS = 5
PARAMETERS = (700, 100, 100, 100, 500)
STEP_SECONDS = 0.028


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    """Tables of the model "tiny": 5 layers on "GH-96" at degrees 1 and 2; on "V100-16" one layer less."""
    times = ["model,gpu,tensor_parallel,micro_batch,layer,forward_seconds,backward_seconds,update_seconds"]
    for gpu, count in (("GH-96", LAYERS), ("V100-16", LAYERS - 1)):
        for degree in (1, 2):
            for batch in (1, 2):
                for layer in reversed(range(count)):
                    seconds = 0.01 * batch / degree
                    times.append(f"tiny,{gpu},{degree},{batch},{layer},{seconds},{2 * seconds},{STEP_SECONDS / degree}")
    sizes = ["model,tensor_parallel,layer,parameter_bytes,input_bytes,output_bytes,activation_bytes"]
    sizes += [
        f"tiny,{n},{layer},{PARAMETERS[layer] // n},8,4000000,{30 // n}" for n in (1, 2) for layer in range(LAYERS)
    ]
    rates = ["gpu,where,gpus,a,b,c,max_bytes_per_second"]
    rates += [f"GH-96,between nodes,{n},0,{n},{2 * n},{10e9 * n}" for n in (1, 2)]
    rates += [f"GH-96,inside a node,{n},0,0,100,{100e9}" for n in (2, 4)]
    for name, lines in (("layer_times", times), ("layer_memory", sizes), ("bandwidth", rates)):
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


EXAMPLES = REPOSITORY / "examples" / "plans"
real = pytest.mark.skipif(not REAL_TABLES.exists(), reason="needs the published tables")


def test_times_and_sizes_are_read(tables: Path) -> None:
    profile = read_gpu_tables(tables, "tiny").profile
    assert (profile.layers, profile.blocks, profile.before, profile.after) == (LAYERS, 3, 1, 1)
    assert profile.tensor_parallel_degrees("GH-96") == (1, 2)
    assert times_of(profile, "GH-96", 2, 2).backward_seconds == (0.02,) * LAYERS
    costs = profile.costs("GH-96", 1, 2)
    assert costs.forward_seconds == pytest.approx([0.04, 0.02, 0.04])  # with embedding and head in the outer blocks
    assert costs.state_bytes == pytest.approx([4800, 600, 3600])  # 24 bytes per parameter of 4
    assert costs.activation_bytes.tolist() == [120, 60, 120]
    # The step takes 28 ms for an embedding, two blocks and a head with 1,400 bytes.
    assert times_of(profile, "GH-96", 1, 1).update_seconds == pytest.approx([0.014, 0.002, 0.002, 0.002, 0.010])
    between = import_bandwidths(tables)["GH-96"].between
    assert between[1].seconds(1e6) == pytest.approx(1e6 / 2e9)  # x = 0: c
    assert between[1].seconds(8e6) == pytest.approx(8e6 / 5e9)  # x = 3: 3 b + c
    assert between[2].seconds(8e6) == pytest.approx(8e6 / 10e9)
    assert between[1].seconds(1e12) == pytest.approx(1e12 / 10e9)  # capped
    path = tables / "layer_times.csv"
    path.write_text(path.read_text().replace(f",{STEP_SECONDS}", ",0.0").replace(f",{STEP_SECONDS / 2}", ",0.0"))
    read = read_gpu_tables(tables, "tiny")
    assert any("GH-96: the optimizer's step was not timed" in each for each in read.left_out)
    assert not any(times_of(read.profile, "GH-96", 1, 1).update_seconds)


@real
def test_the_shipped_files_are_what_the_importer_makes() -> None:
    made = profile_part(read_gpu_tables(REAL_TABLES, "OPT-350").profile, ("A100-40", "V100-16"), (1, 2, 4), 8)
    assert load_profile(EXAMPLES / "opt-350-a100-v100.json") == made
    shipped = load_cluster(EXAMPLES / "clusters" / "a100-v100.toml")
    cluster = make_topology(import_bandwidths(REAL_TABLES), [("A100-40", 1, 4), ("V100-16", 2, 4)])
    assert [device.kind for device in shipped.devices] == [device.kind for device in cluster.devices]
    for one, other in [(0, 1), (0, 4), (4, 5), (4, 8)]:
        for size in (1e5, 1e7, 1e9):
            expected = cluster.channel(one, other).seconds(size)
            assert shipped.channel(one, other).seconds(size) == pytest.approx(expected, rel=0.01)


@real
def test_published_plans_are_predicted() -> None:
    """In N4_D4 the times contradict each other. In N8_D2 of GPT-NEO the stages are those of N4_D1 with four times the
    micro-batch, but memory grew by less than half of three times the activations that stages must hold."""
    profiles, channels, _ = read_published(REAL_TABLES)
    models = {profile.name: profile for profile in profiles}
    plans = load_measured_plans(REAL_TABLES)
    assert len(plans) == 12
    predictions = {plan.name: predict(plan, models[plan.model], channels) for plan in plans}
    compared = [plan for plan in plans if plan.name != "OPT-350/N4/N4_D4"]
    times = [abs(predictions[plan.name].iteration_seconds / plan.iteration_seconds - 1) for plan in compared]
    assert median(times) <= 0.055 and mean(times) <= 0.09 and max(times) < 0.4
    compared = [plan for plan in plans if plan.name != "GPT-NEO/N8/N8_D2"]
    memory = [predictions[plan.name].memory_bytes / plan.memory_bytes - 1 for plan in compared]
    assert min(memory) >= -0.05 and max(memory) <= 0.10
