"""The mistakes of a first try: each error says what to do instead."""

from __future__ import annotations

from typing import Any

import pytest

from colossal_hetero import (
    BalanceConfig,
    BatchConfig,
    CheckpointConfig,
    ElasticConfig,
    HeteroHybridParallelPlugin,
    HeteroZeroPlugin,
    PlanConfig,
    Pruning,
)
from colossal_hetero.accelerator import get_accelerator  # noqa: F401  (Colossal-AI, with its corrections)


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (BalanceConfig, "mod", "did you mean mode"),
        (BalanceConfig, "migrations", "did you mean migration"),
        (Pruning, "prioritys", "did you mean priority"),
        (BatchConfig, "global_batchsize", "did you mean global_batch_size"),
        (CheckpointConfig, "saves_every", "did you mean save_every"),
        (PlanConfig, "clusters", "did you mean cluster"),
        (ElasticConfig, "xyz", "it has .*seed"),
        (HeteroHybridParallelPlugin, "precison", "did you mean precision"),
        (HeteroHybridParallelPlugin, "balances", "did you mean balance"),
    ],
)
def test_misspelled_arguments(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"{kind.__name__} has no argument '{name}'; {meant}"):
        kind(**{name: 1})


@pytest.mark.parametrize(
    "make",
    [lambda: HeteroHybridParallelPlugin(tp_size=2, pp_size=1), lambda: HeteroZeroPlugin(1, global_batch_size=8)],
)
def test_a_plugin_before_the_launch(make: Any) -> None:
    with pytest.raises(
        RuntimeError, match=r"call colossalai\.launch_from_torch\(\) before you make the plugin.*torchrun"
    ):
        make()


def test_a_script_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    import colossalai

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["/somewhere/bert.py"])
    with pytest.raises(RuntimeError, match=r"torchrun --standalone --nproc-per-node 2 bert\.py$"):
        colossalai.launch_from_torch()
