"""Eleven clusters of GPUs whose layer times and bandwidths were published, and the models that were timed on them.

Tables were measured by the authors of Sailor (SOSP 2025, github.com/eth-easl/sailor, MIT, © 2023 ETH Zurich). They have
no times of GPT-Neo-2.7 on GH200; ``estimated_times.json`` has estimated ones, as runs of equal layers. Those
of embedding, block and head were fitted to the times of OPT-350 and OPT-30 there by the bytes of parameters and
activations, and divided by the error of the same fit on V100, where all three were timed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.planner.sailor_tables import GpuChannels, import_bandwidths, make_topology, read_gpu_tables
from colossal_hetero.planner.cluster.topology import Topology
from colossal_hetero.planner.profile.layer_profile import LayerTimes, ModelProfile

DATA = Path(__file__).resolve().parents[2] / "../shared/data/gpu-profiles"
ESTIMATED = Path(__file__).with_name("estimated_times.json")
MODELS = ("OPT-350", "GPT-Neo-2.7")
MICRO_BATCHES = (1, 2, 4, 8)
CLUSTERS = (
    (("A100-40", 2, 4), ("V100-16", 2, 4)),
    (("A100-40", 1, 4), ("V100-16", 4, 4)),
    (("A100-40", 4, 4), ("V100-16", 1, 4)),
    (("A100-80", 2, 4), ("A100-40", 2, 4)),
    (("A100-80", 1, 4), ("V100-16", 2, 4)),
    (("GH-96", 2, 4), ("A100-80", 2, 4)),
    (("GH-96", 1, 4), ("V100-16", 2, 4)),
    (("GH-96", 1, 4), ("A100-40", 1, 4), ("V100-16", 1, 4)),
    (("V100-16", 4, 4),),
    (("RTX-3090", 1, 8), ("Titan-RTX", 1, 8)),
    (("RTX-3090", 1, 8), ("RTX-2080", 1, 8), ("Titan-RTX", 1, 8)),
)
"""Kinds of GPU, each with its number of nodes and GPUs per node."""

Cluster = Sequence[tuple[str, int, int]]


class Published(NamedTuple):
    """What was published."""

    profiles: tuple[ModelProfile, ModelProfile]
    """Of the models."""
    channels: dict[str, GpuChannels]
    """By kind of GPU."""
    notes: tuple[str, ...]
    """Times that were left out or estimated."""


class Case(NamedTuple):
    """A cluster, and a model that was timed on all of its GPUs."""

    cluster: str
    topology: Topology
    profile: ModelProfile


def cluster_name(cluster: Cluster) -> str:
    return " + ".join("{1} × {2} {0}".format(*part) for part in cluster)


def read_published(folder: Path) -> Published:
    """What is in the tables; ends the program if there are none."""
    if not (folder / "layer_times.csv").exists():
        sys.exit(
            f"no measurements in {folder}; give with --data a folder with layer_times.csv, layer_memory.csv, "
            "bandwidth.csv and measured_iterations.json, made from github.com/eth-easl/sailor"
        )
    tables = [read_gpu_tables(folder, model) for model in MODELS]
    notes = [f"{each.profile.name}, {note}." for each in tables for note in each.left_out]
    opt, neo = (each.profile for each in tables)
    neo = with_estimated_times(neo)
    notes.append(f"{neo.name}: {neo.source}.")
    return Published((opt, neo), import_bandwidths(folder), tuple(notes))


def with_estimated_times(profile: ModelProfile) -> ModelProfile:
    """The profile of GPT-Neo-2.7 with times on GH200."""
    times = []
    for row in json.loads(ESTIMATED.read_text()):
        seconds = {
            name: tuple(each for count, each in value for _ in range(count))
            for name, value in row.items()
            if name.endswith("_seconds")
        }
        times.append(LayerTimes(device="GH-96", **(row | seconds)))
    note = "GH-96: estimated from OPT-350 and OPT-30 there, corrected by the error on V100-16"
    note += " (+9 %, +12 % forward, backward)"
    fields = {name: getattr(profile, name) for name in ModelProfile.model_fields}
    return ModelProfile(**fields | {"times": (*profile.times, *times), "source": f"{profile.source}; {note}"})


def published_cases(folder: Path, clusters: Sequence[Cluster] = CLUSTERS) -> list[Case]:
    """All cases; ends the program if there are no tables."""
    profiles, channels, _ = read_published(folder)
    return [
        Case(cluster_name(cluster), make_topology(channels, cluster), profile)
        for cluster in clusters
        for profile in profiles
        if {kind for kind, _, _ in cluster} <= set(profile.devices)
    ]
