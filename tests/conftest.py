"""Marks every test by its folder: ``unit``, ``parallel`` (several ranks) or ``example`` (runs a command of a user)."""

import gc
import os
from pathlib import Path

import pytest
from hypothesis import settings

FOLDER = Path(__file__).parent
MARKERS = {"parallel": pytest.mark.parallel, "examples": pytest.mark.example, "unit": pytest.mark.unit}

# How long an example takes depends on what else the machine does, so it has no deadline. The numbers of examples are
# those of tests that do not name a number. The ordinary profile draws the same examples in every run, so that a change
# is judged by the same tests as the one before; the thorough profile draws new ones.
settings.register_profile("ordinary", deadline=None, max_examples=50, derandomize=True)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ordinary"))


def pytest_configure() -> None:
    """Give each process of pytest-xdist its own share of the cores.

    Ranks of a test wake each other many thousand times a second, which is slow across busy cores.
    """
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker is None or workers is None or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number, count = int(worker.removeprefix("gw")), min(int(workers), len(cores))
    os.sched_setaffinity(0, cores[number % count :: count])


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Prepare Colossal-AI, which test modules import first. The process that only hands tests to others skips it."""
    import colossal_hetero.colossalai_support.accelerator  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests, and put the slowest folders first, so that processes of pytest-xdist end together."""

    def folder(item: pytest.Item) -> str:
        return item.path.relative_to(FOLDER).parts[0]

    for item in items:
        item.add_marker(MARKERS[folder(item)])
    items.sort(key=lambda item: [*MARKERS].index(folder(item)))


def pytest_collection_finish() -> None:
    """Leave what is loaded now out of garbage collections, each of which would take a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def fork_server(request: pytest.FixtureRequest) -> None:
    """Start the fork server of ranks, before any test can start it with other modules.

    It runs while pytest captures output, so that what ranks print is shown with tests that fail.
    """
    if any(item.get_closest_marker("parallel") for item in request.session.items):
        from tests.support.harness import forked_context

        forked_context()
