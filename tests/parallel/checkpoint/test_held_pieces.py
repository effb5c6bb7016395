"""The pieces of all ranks are the model and the optimizer of one process, and other plans can be given them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.checkpoint_runs import MODELS as BUILDERS
from tests.support.checkpoint_runs import (
    boosted,
    different_tensors,
    gathered,
    hybrid,
    last_loss,
    load,
    samples_of,
    train,
)
from tests.support.checkpoints import read_weights
from tests.support.harness import run_ranks
from tests.support.training import sgd

STEPS = 2
ZERO = dict(zero_stage=1, precision="bf16")


def of_one_process(name: str) -> dict[str, Tensor]:
    """Parameters and moments after training without any plugin."""
    model = BUILDERS[name]()
    optimizer = sgd(model)
    for number in range(STEPS):
        inputs = samples_of(name, number)
        outputs = model(inputs["x"]) if name == "vit" else model(**inputs)
        last_loss(outputs, inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
    found: dict[str, Tensor] = {}
    for key, parameter in model.named_parameters():
        found[f"param.{key}"] = parameter.detach()
        found[f"momentum_buffer.{key}"] = optimizer.state[parameter]["momentum_buffer"]
    return found


def check_against_one_process(name: str, options: dict[str, Any]) -> None:
    run = boosted(name, hybrid(**options), sgd)
    train(run, range(STEPS))
    found, expected = gathered(run).tensors, of_one_process(name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def check_models_of_three_ranks() -> None:
    check_against_one_process("llama", dict(tp_size=3))  # padded
    check_against_one_process("vit", dict(tp_size=3))  # fused


def test_the_pieces_of_all_ranks_are_those_of_one_process() -> None:
    run_ranks(3, check_models_of_three_ranks)
    run_ranks(4, check_against_one_process, "gpt2", dict(tp_size=2, pp_size=2))  # fused, tied, padded


def check_against_colossalai(folder: Path) -> None:
    run = boosted("llama", hybrid(tp_size=2, **ZERO))
    train(run, range(STEPS))
    found = gathered(run).tensors
    run.booster.save_model(run.model, str(folder / "model"), shard=True)
    run.booster.save_optimizer(run.optimizer, str(folder / "optimizer"), shard=True)
    dist.barrier()
    for name, weight in read_weights(folder / "model").items():
        assert torch.equal(found[f"param.{name}"].to(weight.dtype), weight), name
    files = (folder / "optimizer").glob("*optim*.bin")
    parts = [torch.load(path, weights_only=True) for path in files if "group" not in path.name]
    states = {number: state for part in parts for number, state in part.items()}
    (names,) = run.outline.groups
    assert len(states) == len(names)
    for number, state in states.items():
        for entry, value in state.items():
            assert torch.equal(found[f"{entry}.{names[number]}"], torch.as_tensor(value)), f"{entry} of {names[number]}"


def test_zero_slices_are_those_of_colossalais_checkpoint(tmp_path: Path) -> None:
    run_ranks(4, check_against_colossalai, tmp_path)


def check_reload() -> None:
    one = boosted("gpt2", hybrid(pp_size=2, **ZERO), sgd)
    train(one, range(STEPS))
    saved = gathered(one)
    losses = train(one, range(STEPS, STEPS + 2))
    two = boosted("gpt2", hybrid(tp_size=2, precision="fp16"), sgd)
    train(two, [7])  # so that everything must be replaced
    load(two, saved)
    found = gathered(two)
    assert found.kinds == saved.kinds and different_tensors(found, saved) == []
    copies = two.optimizer.get_working_to_master_map()
    assert all(torch.equal(each, copies[id(each)].half()) for each in two.model.parameters())
    assert train(two, range(STEPS, STEPS + 2)) == pytest.approx(losses, rel=2e-2)


def test_another_plan_with_copies_in_higher_precision_continues() -> None:
    run_ranks(4, check_reload)
