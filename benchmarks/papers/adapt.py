"""ADAPT: work fitted to devices that others use, too (Kashyap 2026, Tables 7.1 and 8.4, Fig. 8.5); needs root."""

from __future__ import annotations

from typing import Any

from benchmarks.papers.page import Curves, Figure, Inputs, measured

NAMES = {"equal": "equal parts", "adapt": "ADAPT", "ours": "ours"}


def _runs() -> dict[str, Any]:
    return measured("benchmarks.papers.adapt_runs", "adapt")


def dp(inputs: Inputs) -> Figure:
    found = _runs()["steady"]
    equal = found["equal"][0]
    paper = {"equal": "1.00 (6,120 s, 25,000 + 25,000)", "adapt": "1.10 (5,576 s, 29,683 + 20,317)", "ours": ""}
    rows = [(NAMES[name], paper[name], equal / each[0], each[0], each[1]) for name, each in found.items()]
    columns = ("batches", "paper: speed-up (epoch, samples)", "here", "iteration [s]", "samples of a global batch")
    why = (
        "Two ranks, the second one with 60 % of a core (a CPU quota), a small ViT, ZeRO stage 0. The paper has two RTX "
        "5000 of which one is loaded by 50 %; its split moves 9 % of the samples, that of measured times moves more."
    )
    return Figure("ADAPT, Table 8.4: data parallelism, one device loaded", columns, rows, why)


def pp(inputs: Inputs) -> Figure:
    options = ("--quotas", "0.6", "--hidden", "192", "--rounds", "2", "--orders")
    found = measured("benchmarks.pipeline.pipeline_stages", "pipeline", *options)
    equal = found["equal"][1]
    paper = {"equal": "1.00", "adapt": "ViT 1.56 to 1.91", "ours": ""}
    rows = [(NAMES[name], paper[name], equal / seconds, seconds, split) for name, (split, seconds) in found.items()]
    columns = ("stages", "paper: speed-up", "here", "iteration [s]", "blocks")
    why = (
        "Two stages of a ViT with six blocks, rank 1 with 60 % of a core. No split can gain more than 1.33, the mean "
        "speed over that of the slower device; the paper's ViT gains more, because its memory is loaded, too."
    )
    return Figure("ADAPT, Table 7.1: a pipeline, one device loaded", columns, rows, why)


def ramp(inputs: Inputs) -> Figure:
    found = {float(quota): each for quota, each in _runs().items() if quota != "steady"}
    rows = [
        (f"{quota:g}", *(each[name][0] for name in NAMES), each["equal"][0] / each["ours"][0], each["ours"][1])
        for quota, each in found.items()
    ]
    lines = {}
    for key, name in NAMES.items():
        seconds = [value for each in found.values() for value in each[key][2]]
        lines[name] = (range(len(seconds)), seconds)
    columns = ("quota of rank 1", "equal [s]", "ADAPT [s]", "ours [s]", "equal / ours", "samples, ours")
    why = (
        "The quota of a core falls step by step; the picture has all iterations. ADAPT profiles every k epochs; here "
        'it is our plugin with `method="adapt"`, which divides again every 24 iterations by times of training itself.'
    )
    curves = [Curves("iteration", "seconds", lines)]
    return Figure("ADAPT, Fig. 8.5: a load that grows", columns, rows, why, curves)


FIGURES = {"dp": dp, "pp": pp, "ramp": ramp}
