"""``optimizer.clip_grad_by_norm`` and ``clip_grad_by_value`` clip as torch does in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.parallel.corrections.test_gradient_norm import (
    BF16,
    FP16,
    FP32,
    MAX_NORM,
    PIPELINE,
    global_batch,
    loss_of,
    make,
    run_model,
    train_alone,
)
from tests.support.checkpoints import read_weights
from tests.support.harness import run_ranks
from tests.support.migration_runs import migrate, slow
from tests.support.training import Trained, batch, boost, ours, scripted, sgd, theirs
from tests.support.training import loss_of as vit_loss
from tests.support.training import train as train_vit

SCALE = 2.0**6
VALUE = 2.0**-8
"""Below the largest element of the gradients, and exact in all precisions."""

CASES: dict[str, dict[str, Any]] = {
    f"{layout} {precision['precision']}": options | precision
    for layout, options in (("tp2", dict(tp_size=2, pp_size=1)), ("pp2", dict(tp_size=1, **PIPELINE)))
    for precision in (FP32, BF16, FP16 | dict(initial_scale=SCALE))
}


def descend(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def run_backward(run: Trained, name: str) -> None:
    if run.plugin.pp_size > 1:
        run.booster.execute_pipeline(iter([global_batch(name)]), run.model, loss_of, run.optimizer)
    else:
        run.booster.backward(run_model(run.model, global_batch(name)), run.optimizer)


def trained(run: Trained) -> dict[str, tuple[Any, Any]]:
    """The parameters with gradients, and their masters."""
    masters = getattr(run.optimizer, "working_to_master_map", {})
    named = run.model.unwrap().named_parameters()
    return {name: (each, masters.get(each, each)) for name, each in named if each.grad is not None}


def gradients(run: Trained) -> dict[str, Tensor]:
    return {name: each.grad.detach().clone().float() for name, (each, _) in trained(run).items()}


def scale_of(run: Trained) -> float:
    return SCALE if run.plugin.precision == "fp16" else 1.0


def step_with(run: Trained, what: str, expected: dict[str, Tensor]) -> None:
    """Step with gradients that must be ``expected``."""
    pairs, tolerance = trained(run), 1e-5 if run.plugin.precision == "fp32" else 1e-2
    found = gradients(run)
    for name in pairs:
        error = (found[name] - expected[name]).norm()
        assert error <= tolerance * expected[name].norm() + 1e-6, f"{what}: {name}"
    changed = {name: master - found[name] / scale_of(run) for name, (_, master) in pairs.items()}
    run.optimizer.step()
    for name, (_, master) in pairs.items():
        torch.testing.assert_close(
            master.detach(), changed[name], msg=lambda text, name=name: f"{what}: {name}: {text}"
        )


def check(own: bool, name: str, cases: list[str], folder: Path) -> None:
    norm, change = train_alone(name)
    assert norm > 10 * MAX_NORM
    for case in cases:
        what = f"{name} {case}"
        is_exact = CASES[case]["precision"] == "fp32"
        run = boost((theirs if own else ours)(**CASES[case], custom_policy=None), make(name), descend)
        run_backward(run, name)
        before = gradients(run)
        found = run.optimizer.clip_grad_by_norm(MAX_NORM)
        assert isinstance(found, Tensor)
        assert float(found) == pytest.approx(norm, rel=1e-5 if is_exact else 4e-3), what
        step_with(run, what, {key: value * (MAX_NORM / norm) for key, value in before.items()})
        if is_exact:
            run.booster.save_model(run.model, str(folder / case), shard=True)
            dist.barrier()
            initial, after = make(name).state_dict(), read_weights(folder / case)
            error = torch.stack([(after[key] - initial[key] - change[key]).norm() for key in change]).norm()
            assert error <= 1e-3 * MAX_NORM, what
        run.optimizer.zero_grad()

        run_backward(run, name)
        before = gradients(run)
        assert float(run.optimizer.clip_grad_by_norm(1e6)) > MAX_NORM
        run.optimizer.clip_grad_by_value(VALUE)
        limit = VALUE * scale_of(run)
        assert max(value.abs().max() for value in before.values()) > limit, what
        step_with(run, what, {key: value.clamp(-limit, limit) for key, value in before.items()})
        run.optimizer.zero_grad()

        run_backward(run, name)
        with pytest.raises(ValueError, match="which clips by the 2-norm"):
            run.optimizer.clip_grad_by_norm(MAX_NORM, norm_type=1.0)
        if dist.get_rank() == 1:
            next(iter(trained(run).values()))[0].grad.fill_(torch.inf)
        with pytest.raises(RuntimeError, match="they cannot be clipped"):
            run.optimizer.clip_grad_by_norm(MAX_NORM, error_if_nonfinite=True)
        if CASES[case]["precision"] == "fp16":
            assert float(run.optimizer.clip_grad_by_norm(MAX_NORM)) == torch.inf
            run.optimizer.clip_grad_by_value(VALUE)
            masters = {key: (master, master.detach().clone()) for key, (_, master) in trained(run).items()}
            run.optimizer.step()
            assert all(torch.equal(master, value) for master, value in masters.values()), what


# GPT-2 has fused layers, and a weight that two stages share.
@pytest.mark.parametrize("name", ["gpt2", "vit"])
def test_clipping_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    run_ranks(2, check, False, name, list(CASES), tmp_path)


def test_colossalais_plugin_clips_in_the_same_way(tmp_path: Path) -> None:
    run_ranks(2, check, True, "gpt2", ["tp2 fp32", "pp2 bf16"], tmp_path)


def check_moved_units() -> None:
    """Clip after units were given away for good, in bf16."""
    norms = []
    for own in (True, False):
        options = dict(tp_size=2, precision="bf16")
        with scripted(slow(1)):
            plugin = theirs(**options) if own else ours(migrate("block", reshard_after=1), **options)
            run = train_vit(boost(plugin, None, sgd), 3)
        images, labels = batch(99)
        run.booster.backward(vit_loss(run.model(images), labels), run.optimizer)
        before = gradients(run)
        norms.append(float(run.optimizer.clip_grad_by_norm(MAX_NORM)))
        assert norms[-1] > 2 * MAX_NORM
        for name, gradient in gradients(run).items():
            torch.testing.assert_close(gradient, before[name] * (MAX_NORM / norms[-1]), rtol=1e-2, atol=1e-6)
    assert run.plugin.balancer.has_resharded
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


def test_clipping_after_units_were_given_away_for_good() -> None:
    run_ranks(2, check_moved_units)


def check_refused() -> None:
    options = dict(tp_size=1, precision="bf16", zero_stage=1)
    for plugin in (theirs(**options), ours(**options, fp8_communication=True)):
        run = boost(plugin, None, sgd)
        for clip in (run.optimizer.clip_grad_by_norm, run.optimizer.clip_grad_by_value):
            with pytest.raises(ValueError, match="give the plugin max_norm"):
                clip(MAX_NORM)


def test_colossalais_zero_optimizer_refuses_to_clip_before_the_step() -> None:
    run_ranks(1, check_refused)
