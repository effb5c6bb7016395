"""Plans of peers are read from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.planner.peers.compare import load_peer_plans
from benchmarks.planner.peers.simulator import load_sailor
from benchmarks.planner.published_clusters import CLUSTERS, cluster_name
from tests.unit.planner.report.test_plan_table import plan

PLANS = """
peer = "Metis"
repository = "SamsungLabs/Metis"
commit = "4b24046fbef31ca6fec6ccfd772d709f16257320"

[[plans]]
cluster = "2 × 4 A100-40 + 2 × 4 V100-16"
model = "OPT-350"
layout = "dp 8 x pp [V100-16 0-9 | A100-40 10-23], micro-batch 1 x 32"
"""


def test_plans_of_peers(tmp_path: Path) -> None:
    (tmp_path / "metis.toml").write_text(PLANS, encoding="utf-8")
    (each,) = load_peer_plans(tmp_path)
    assert each.peer == "Metis (SamsungLabs/Metis@4b24046)" and each.cluster == cluster_name(CLUSTERS[0])
    (tmp_path / "metis.toml").write_text(PLANS.replace("commit", "version"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"metis\.toml lacks commit"):
        load_peer_plans(tmp_path)
    (tmp_path / "metis.toml").write_text(PLANS.replace("layout", "plan"), encoding="utf-8")
    with pytest.raises(ValueError, match="needs cluster, model and layout"):
        load_peer_plans(tmp_path)


def test_without_sailor_the_reason_is_said(tmp_path: Path) -> None:
    made = plan()
    assert load_sailor(None, made) == "no checkout was given with --sailor"  # type: ignore[arg-type]
    assert "is not a checkout of Sailor's repository" in str(load_sailor(tmp_path, made))  # type: ignore[arg-type]
