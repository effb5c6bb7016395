"""What a plugin tells its user while it trains: its report, the numbers for loggers, and the sentences."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster

from colossal_hetero import BalanceConfig
from colossal_hetero.balance import balancer as balancer_module
from colossal_hetero.layers import hetero_layers
from colossal_hetero.plugin.hybrid import hybrid_plugin
from colossal_hetero.plugin.report import Report
from tests.support.checks import on
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import assert_same_parameters, batch, boost, loss_of, ours, scripted, sgd, theirs, train

AUTO, OFF = BalanceConfig(mode="auto", measure_costs=False), BalanceConfig(mode="off")


def slow(straggler: int, begin: int = 0, slowdown: float = 4.0) -> Any:
    return lambda rank, iteration: slowdown if rank == straggler and iteration >= begin else 1.0


@contextmanager
def sentences() -> Iterator[list[str]]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger().removeHandler(handler)


def default(**choices: Any) -> Any:
    return patch.object(hybrid_plugin, "DEFAULT_BALANCE", BalanceConfig(reshard_after=None, **choices))


@on(2)
@on(3)
def the_report_says_who_was_slow_and_what_was_done() -> None:
    """Each rank is the straggler in turn; one rank alone asks for the report. Callbacks come once for each exchange."""
    ranks, is_first = dist.get_world_size(), dist.get_rank() == 0
    for straggler in range(ranks) if IS_THOROUGH or ranks < 3 else (ranks - 1,):
        name, given = f"straggler {straggler} of {ranks}", list[dict[str, float]]()
        with scripted(slow(straggler)), sentences() as said:
            run = boost(ours(AUTO, tp_size=ranks, on_report=given.append, report_every=12))
            before = run.plugin.report()
            train(run, 13)
        assert before == Report() and "Nothing is known yet" in str(before)
        if dist.get_rank() == ranks - 1:
            report = run.plugin.report()
            balance: Any = report.balance
            row = balance.ranks[straggler]
            assert report.iterations == 12 and balance.changes >= 1 and balance.mode == "auto", name
            assert row.migrated > 0.2 and row.relative_score == pytest.approx(0.29, abs=0.03), name
            # 0.8 s of products and 0.2 s of other work, 4 times as long on one rank; then with its share.
            most = max(each.work_seconds for each in balance.ranks)
            assert balance.balanced_seconds == pytest.approx(most + 0.01), name
            assert balance.unbalanced_seconds == pytest.approx(3.4 + 0.01, rel=0.02), name
            assert balance.saved_seconds > 0.3 and balance.bound_seconds <= balance.balanced_seconds, name
            text = str(report)
            assert f" {straggler} " in text and "balancing saved" in text and max(map(len, text.splitlines())) <= 80
            assert json.loads(json.dumps(report.as_dict()))["balance"]["ranks"][straggler]["migrated"] == row.migrated
        on_change = [each for each in said if f"rank {straggler} takes 3.4 times as long" in each]
        assert len(on_change) == is_first, f"{name}: {said}"
        assert all(" of its work now runs on rank" in each and "; iteration " in each for each in on_change), on_change
        assert [numbers["iteration"] for numbers in given] == ([4, 8, 12] if is_first else [])
        assert not given or given[-1][f"balance/rank{straggler}/migrated"] > 0.2


@on(4)
def the_slowest_of_several_groups_is_shown() -> None:
    """Ranks 2 and 3 are another replica, of which rank 0 knows by the exchange only."""
    with scripted(slow(3)), sentences() as said:
        run = train(boost(ours(AUTO, tp_size=2)), 17)
    balance: Any = run.plugin.report().balance
    assert [each.rank for each in balance.ranks] == [0, 1, 2, 3]
    assert balance.ranks[3].migrated > 0.3 and balance.ranks[0].received == 0.0
    assert balance.unbalanced_seconds == pytest.approx(3.41, rel=0.02)
    assert any("rank 3 takes" in each for each in said) == (dist.get_rank() == 2)


@on(2)
def without_balancing_it_is_said_once_what_it_would_bring() -> None:
    for slowdown in (1.0, 4.0):
        with scripted(slow(1, slowdown=slowdown)), sentences() as said:
            run = train(boost(ours(OFF, tp_size=2)), 20)
        balance: Any = run.plugin.report().balance
        assert balance.saved_seconds == pytest.approx(0.0) and balance.mode == "off"
        assert len(said) == (dist.get_rank() == 0 and slowdown > 1.0), said
        words = ("rank 1 takes 3.4 times as long", 'BalanceConfig(mode="auto")', "1.490 s instead of 3.410 s")
        assert not said or all(each in said[0] for each in words)


@on(2)
def costs_are_measured_only_if_a_rank_is_slow() -> None:
    for begin, expected in ((10**6, 0), (10, 1)):
        costs = patch.object(balancer_module, "prepare_costs", return_value=balancer_module.Costs())
        with scripted(slow(1, begin)), costs as asked:
            run = train(boost(ours(BalanceConfig(), tp_size=2)), 18)
        assert asked.call_count == expected and bool(sum(run.plugin.balancer.plan.migrate)) == bool(expected)


@on(2)
def a_rank_that_is_lost_after_the_step_shows_in_the_next_pass() -> None:
    """Elastic training would make a step again that has failed, and this one has not."""
    expected = train(boost(ours(AUTO, tp_size=2)), 3)
    run, lost = boost(ours(AUTO, tp_size=2)), RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    train(run, 2)
    images, labels = batch(2, 0)
    with patch.object(run.plugin.balancer._latest, "end_iteration", side_effect=lost):
        run.finish(loss_of(run.model(images), labels))
    assert_same_parameters(run.parameters, expected.parameters, "after the step")
    for training in (True, False):
        run.model.train(training)
        run.plugin.balancer._failure = run.plugin.balancer._failure or lost
        with torch.set_grad_enabled(training), pytest.raises(RuntimeError, match="Connection closed by peer"):
            run.model(images)
    run.model(images)


@on(2)
def by_default_work_migrates_and_no_parameter_changes_its_shape() -> None:
    expected = train(boost(theirs(tp_size=2)), 12)
    with scripted(slow(1)), default():
        run = boost(ours(tp_size=2))
        shapes = [each.shape for each in run.model.parameters()]
        train(run, 12)
    assert run.plugin.balance.reshard_after is None and run.plugin.balancer.plan.migrate[1] > 0.3
    assert shapes == [each.shape for each in run.model.parameters()] and not run.plugin.balancer.has_resharded
    assert run.losses == pytest.approx(expected.losses, rel=1e-4)


@on(2)
def what_cannot_be_balanced_is_only_measured_by_default() -> None:
    options = dict(tp_size=2, fp8_communication=True)
    with pytest.raises(ValueError, match="cannot be combined with fp8_communication=True"):
        boost(ours(AUTO, **options))
    with default(), sentences() as said:
        run = boost(ours(**options))
    assert not run.plugin.balancer.active and run.plugin.balancer.config.mode == "off"
    assert all(layer.block is None for layer in hetero_layers(run.model).values())
    assert all("only measured" in each and "fp8_communication=True" in each for each in said)
    assert len(said) == (dist.get_rank() == 0)


@on(2)
def the_default_gives_way_to_graphs_and_other_plugins() -> None:
    with default(head=False):
        run = train(boost(ours(tp_size=2)), 2)
        graph = patch.multiple(torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True)
        with graph:
            run.plugin.balancer.begin()
        assert not run.plugin.balancer.active
        chosen = boost(ours(AUTO, tp_size=2))
        with graph, pytest.raises(RuntimeError, match="balance mode 'auto' cannot be used in a CUDA graph"):
            chosen.plugin.balancer.begin()
        first, other = boost(ours(tp_size=2)), ours(tp_size=2)
        Booster(plugin=other).boost(first.model, sgd(first.model))
        assert not first.plugin.balancer.active and other.balancer.active


@on(2)
def callbacks_may_fail_and_a_profile_of_torch_has_ranges_for_what_balancing_does() -> None:
    with scripted(slow(1)), sentences() as said:
        run = boost(ours(AUTO, tp_size=2, on_report=lambda numbers: 1 / 0, report_every=4))
        train(run, 9, each=lambda iteration: run.plugin.report())
    failed = [each for each in said if "on_report failed after iteration" in each]
    assert len(failed) == (2 if dist.get_rank() == 0 else 0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(run, 1)
    names = {event.name for event in profile.events()}
    assert {"colossal_hetero.layer", "colossal_hetero.migrate", "colossal_hetero.wait"} <= names
