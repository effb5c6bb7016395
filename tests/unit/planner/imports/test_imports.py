"""Profiles from files of other programs: small files made by hand, and traces that torch's profiler exports here."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from colossal_hetero.planner.imports.megatron_log import read_megatron_log
from colossal_hetero.planner.imports.torch_trace import read_torch_trace
from colossal_hetero.planner.imports.whole_model import WholeModelTimes, merged, profile_of_whole_model
from colossal_hetero.planner.profile.gpt import Transformer
from colossal_hetero.planner.profile.layer_profile import load_model_profile
from tests.support.command_line import failure, run

GPT = Transformer(layers=4, hidden=64, heads=4, vocabulary=1000, sequence=32)
SIZES = ("--layers", 4, "--hidden", 64, "--heads", 4, "--vocabulary", 1000, "--sequence", 32)

MEGATRON = """
 [2026-01-01] iteration        1/     10 | elapsed time per iteration (ms): 9000.0 |
(min, max) time across ranks (ms):
    forward-backward ...............................: (8000.00, 8001.00)
    forward-compute ................................: (7000.00, 7100.00)
    backward-compute ...............................: (900.00, 910.00)
    optimizer ......................................: (99.00, 99.00)
 iteration        2/     10 | elapsed time per iteration (ms): 1300.0 |
(min, max) time across ranks (ms):
    forward-compute ................................: (390.00, 400.00)
    backward-compute ...............................: (790.00, 800.00)
    optimizer ......................................: (19.00, 20.00)
 iteration        3/     10 |
(min, max) time across ranks (ms):
    forward-compute ................................: (395.00, 404.00)
    backward-compute ...............................: (795.00, 804.00)
    optimizer ......................................: (20.00, 22.00)
"""


# Megatron --------------------------------------------------------------------------------------------------


def test_a_log_of_megatron(tmp_path: Path) -> None:
    log, out = tmp_path / "log.txt", tmp_path / "profile.json"
    log.write_text(MEGATRON)
    # The first iteration is left out; the others are the medians of the slowest rank, over 4 micro-batches.
    assert read_megatron_log(log, 4) == pytest.approx((0.1005, 0.2005, 0.021))
    arguments = ("import", "megatron", log, *SIZES, "--micro-batches", 4, "--out", out)
    assert run(*arguments, "--device", "A100-40", "--micro-batch", 2).exit_code == 0
    profile = load_model_profile(out)
    assert sum(profile.times[0].forward_seconds) == pytest.approx(0.1005)
    assert "timed by Megatron (log.txt)" in profile.source
    again = (*arguments, "--add-to", out)
    assert "has times of A100-40 at tensor_parallel 1" in failure(*again, "--device", "A100-40", "--micro-batch", 2)
    assert run(*again, "--device", "V100-16", "--micro-batch", 2, "--tp", 2).exit_code == 0
    profile = load_model_profile(out)
    assert [each.key for each in profile.times] == [("A100-40", 1, 2), ("V100-16", 2, 2)]
    assert [each.tensor_parallel for each in profile.sizes] == [1, 2]


def test_logs_that_do_not_suffice(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("iteration 1 | elapsed time per iteration (ms): 1\n")
    with pytest.raises(
        ValueError, match="no times of forward-compute and backward-compute; run Megatron with --timing"
    ):
        read_megatron_log(log, 1)
    log.write_text(MEGATRON + "    forward-recv ....: (1.00, 2.00)\n")
    with pytest.raises(ValueError, match=r"pipeline stages.*does not suffice"):
        read_megatron_log(log, 1)
    with pytest.raises(ValueError, match="cannot be read"):
        read_megatron_log(tmp_path / "none", 1)


# torch.profiler --------------------------------------------------------------------------------------------


class Slow(torch.autograd.Function):
    """Takes 20 ms forward and 60 ms backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("slow"):
            return _wait(value, 0.02)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return _wait(gradient, 0.06)


def _wait(value: torch.Tensor, seconds: float) -> torch.Tensor:
    """Repeats an operator for so long, so that the profiler sees it."""
    end = time.perf_counter() + seconds
    matrix = torch.ones(192, 192)
    while time.perf_counter() < end:
        matrix = matrix @ matrix * 0
    return value * 1


def test_a_trace_of_this_machine(tmp_path: Path) -> None:
    weight = torch.ones(4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    path = tmp_path / "trace.json"
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=3)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(4):
            for _ in range(2):
                Slow.apply(weight).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            profiler.step()
    forward, backward, update = read_torch_trace(path, 2)
    assert min(forward, backward, update) > 0
    steps = [
        each["dur"]
        for each in json.loads(path.read_text())["traceEvents"]
        if each.get("name", "").startswith("ProfilerStep#") and each.get("ph") == "X"
    ]
    # Operators take a part of each iteration, and those inside others count once.
    assert len(steps) == 3 and 2 * (forward + backward) + update <= max(steps) / 1e6


def event(name: str, start: float, duration: float, category: str, correlation: int | None = None) -> dict[str, Any]:
    arguments = {} if correlation is None else {"correlation": correlation}
    return dict(ph="X", name=name, ts=start, dur=duration, cat=category, pid=1, tid=1, args=arguments)


def gpu_trace() -> list[dict[str, Any]]:
    """Two iterations of one micro-batch; kernels run later than they are launched."""
    events = []
    for step, start in enumerate((0.0, 1000.0)):
        events += [
            event(f"ProfilerStep#{step}", start, 900.0, "user_annotation"),
            event(f"ProfilerStep#{step}", start + 300, 900.0, "gpu_user_annotation"),
            event("cudaLaunchKernel", start + 10, 5, "cuda_runtime", 10 * step + 1),
            event("gemm", start + 300, 100, "kernel", 10 * step + 1),
            event("autograd::engine::evaluate_function: MmBackward0", start + 100, 50, "cpu_op"),
            event("cudaLaunchKernel", start + 110, 5, "cuda_runtime", 10 * step + 2),
            event("gemm", start + 400, 220, "kernel", 10 * step + 2),
            event("Optimizer.step#Adam.step", start + 200, 50, "user_annotation"),
            event("cudaLaunchKernel", start + 210, 5, "cuda_runtime", 10 * step + 3),
            event("adam", start + 620, 30, "kernel", 10 * step + 3),
        ]
    return events


def test_kernels_belong_to_the_phase_that_launched_them(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": gpu_trace()}).encode()))
    assert read_torch_trace(path, 1) == pytest.approx((100e-6, 220e-6, 30e-6))
    out = tmp_path / "profile.json"
    arguments = ("--device", "A100-40", "--micro-batch", 1, "--micro-batches", 1, "--out", out)
    assert run("import", "trace", path, *SIZES, *arguments).exit_code == 0
    assert sum(load_model_profile(out).times[0].backward_seconds) == pytest.approx(220e-6)


def test_operators_of_a_cpu_by_hand(tmp_path: Path) -> None:
    """Two threads; operators that follow each other at once, one inside another, and one between two iterations."""
    events = []
    for step, start in enumerate((0.0, 100.0, 300.0)):
        events += [
            event(f"ProfilerStep#{step}", start, 100.0, "user_annotation"),
            event("aten::linear", start, 20, "cpu_op"),
            event("aten::mm", start + 5, 15, "cpu_op"),
            event("aten::relu", start + 20, 10, "cpu_op"),
            event("aten::copy", start + 20, 20, "cpu_op") | {"tid": 2},
            event("autograd::engine::evaluate_function: MmBackward0", start + 50, 30, "cpu_op"),
            event("aten::mm", start + 55, 10, "cpu_op"),
            event("Optimizer.step#Adam.step", start + 85, 10, "user_annotation"),
            event("aten::add", start + 85, 8, "cpu_op"),
        ]
    events.append(event("aten::load", 210.0, 50, "cpu_op"))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(events))
    assert read_torch_trace(path, 2) == pytest.approx((25e-6, 15e-6, 8e-6))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1]", "no list traceEvents"),
        ("{", "is not JSON"),
        (json.dumps({"traceEvents": gpu_trace()[2:4]}), "no ProfilerStep#N ranges"),
        (json.dumps({"traceEvents": gpu_trace()[:4]}), "no backward pass"),
        (
            json.dumps([each for each in gpu_trace() if each["cat"] != "cuda_runtime"]),
            "kernels, but not their launches",
        ),
    ],
)
def test_traces_that_do_not_suffice(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        read_torch_trace(path, 1)


# Times of the whole model ----------------------------------------------------------------------------------


def test_times_are_divided_by_operations_and_parameters() -> None:
    profile = profile_of_whole_model(
        GPT, "A100-40", WholeModelTimes(1.0, 2.0, 0.5), micro_batch=2, tensor_parallel=2, source="here"
    )
    (times,) = profile.times
    assert (times.key, times.forward_seconds[0]) == (("A100-40", 2, 2), 0.0)
    head = GPT.head_forward_flop / (4 * GPT.block_forward_flop + GPT.head_forward_flop)
    assert times.forward_seconds[-1] == pytest.approx(head)
    assert times.backward_seconds == pytest.approx([2 * each for each in times.forward_seconds])
    assert sum(times.update_seconds) == pytest.approx(0.5)
    assert times.update_seconds[1] / times.update_seconds[0] == pytest.approx(
        GPT.block_parameters / GPT.embedding_parameters, rel=1e-3
    )
    with pytest.raises(ValueError, match="forward takes 0"):
        profile_of_whole_model(GPT, "A100-40", WholeModelTimes(0.0, 2.0, 0.5), micro_batch=2, source="here")
    other = Transformer(layers=5, hidden=64, heads=4, vocabulary=1000, sequence=32)
    longer = profile_of_whole_model(other, "A100-40", WholeModelTimes(1.0, 2.0, 0.5), micro_batch=2, source="here")
    with pytest.raises(ValueError, match="different models: name"):
        merged(profile, longer)
