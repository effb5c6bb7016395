"""What is saved when all members leave, and by the booster after a change of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster

from tests.parallel.elastic.test_elastic_training import STEPS
from tests.parallel.plugin.unequal.test_unequal_replicas import gpt2
from tests.support.elastic_jobs import Job, Kill, check_parameters, run_job, train, undisturbed


def test_all_members_are_warned_at_once(tmp_path: Path) -> None:
    """The state after the last step is saved, although only every third step is saved otherwise."""
    nodes = ["big-0", "small-0", "small-1"]
    outcome = run_job(nodes, STEPS, warnings={0: 4, 1: 4, 2: 4}, folder=tmp_path)
    assert outcome.errors == [] and set(outcome.ended.values()) == {0}
    last = max(outcome.losses)
    assert 4 <= last < STEPS and outcome.parameters == []
    outcome = run_job(nodes[:2], STEPS, folder=tmp_path)
    assert {start.step for start in outcome.starts} == {last}
    assert sorted(outcome.losses) == list(range(last + 1, STEPS + 1))
    check_parameters(outcome.parameters, STEPS)


def train_and_save(folder: Path, kill: Kill | None, told: Any) -> None:
    """The script of members that save with the booster at the end."""

    def save(booster: Booster, model: Any, optimizer: Any) -> None:
        booster.save_model(model, str(folder / "model"), shard=True)
        booster.save_optimizer(optimizer, str(folder / "optimizer"), shard=True)
        dist.barrier()
        before = {name: each.detach().clone() for name, each in model.unwrap().named_parameters()}
        for parameter in model.unwrap().parameters():
            parameter.data.zero_()
        booster.load_model(model, str(folder / "model"))
        booster.load_optimizer(optimizer, str(folder / "optimizer"))
        for name, each in model.unwrap().named_parameters():
            torch.testing.assert_close(each.detach(), before[name], rtol=0, atol=0)

    train(STEPS, kill, None, (), told, at_end=save)


def test_the_booster_saves_after_a_change_of_the_plan(tmp_path: Path) -> None:
    """Of two replicas, in which a pipeline has one stage, the other one is lost."""
    with Job(STEPS) as job:
        for node in ("big-0", "small-0", "small-1"):
            job.start(node, script=(train_and_save, tmp_path, Kill(4, "forward") if node == "big-0" else None))
        outcome = job.run()
    assert outcome.errors == [] and len(outcome.parameters) == 2
    check_parameters(outcome.parameters, STEPS)
    model = gpt2().double()
    saved: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "model").glob("*.bin"):
        saved |= torch.load(path, weights_only=True)
    assert not model.load_state_dict(saved, strict=False).missing_keys
    for name, expected in undisturbed(STEPS)[1].items():
        torch.testing.assert_close(dict(model.named_parameters())[name].detach(), expected, rtol=1e-9, atol=1e-9)
