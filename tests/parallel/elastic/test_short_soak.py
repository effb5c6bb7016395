"""A short soak: what ``benchmarks/elastic/soak.py`` does for long."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.elastic.soak import AIM, check_folder, soak
from tests.support.elastic_jobs import undisturbed

STEPS = 26


def test_members_that_come_and_go_at_random(tmp_path: Path) -> None:
    happened, job = soak(kills=4, steps=STEPS, seed=1, folder=tmp_path)
    outcome = job.outcome
    assert outcome.errors == [] and sorted(outcome.losses) == list(range(1, STEPS + 1))
    assert any(kind.startswith("kill") for kind in happened) and "join" in happened
    _, expected = undisturbed(STEPS)
    assert outcome.parameters
    for parameters in outcome.parameters:
        for name, found in parameters.items():
            reference = expected.get(name, expected["transformer.wte.weight"])
            torch.testing.assert_close(torch.from_numpy(found)[: len(reference)], reference, rtol=AIM, atol=AIM)
    assert check_folder(tmp_path / "checkpoints")
