"""Reading availability traces, and which devices are there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossal_hetero.elastic.replay.availability_trace import load_availability
from colossal_hetero.elastic.replay.available_devices import available_devices
from colossal_hetero.planner.cluster.topology import Topology
from tests.support.machines import Nodes, machines


def written(folder: Path, text: str) -> Path:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def cluster() -> Topology:
    """The nodes 0-0 and 0-1, or as :func:`machines` names them, with two devices each."""
    return machines(Nodes("InfiniBand", (2, 2)))


def test_rows_are_read(tmp_path: Path) -> None:
    rows = load_availability(written(tmp_path, "seconds, gpus\n10,4\n\n73.5, 2\n100,3\n"))
    assert [(row.line, row.seconds, row.gpus, row.devices) for row in rows] == [
        *((2, 10.0, 4, None), (4, 73.5, 2, None), (5, 100.0, 3, None)),
    ]
    (row, _) = load_availability(written(tmp_path, "gpus,devices,seconds\n2,a/0 b/1,0\n0,,5\n"))
    assert row.devices == ("a/0", "b/1")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; the first line of a trace is seconds,gpus"),
        ("seconds\n1\n2\n", "line 1: the columns are seconds; a trace has seconds, gpus"),
        ("seconds,gpus,price\n0,1,2\n", "the columns are seconds, gpus, price"),
        ("seconds,gpus\n0,1\n", "has 1 rows; a trace has at least 2"),
        ("seconds,gpus\n0,1\n5\n", "line 3 has 1 values, but there are 2 columns: seconds, gpus"),
        ("seconds,gpus\n0,1\n5,x\n", "line 3: gpus is 'x': must be a whole number"),
        ("seconds,gpus\n0,-1\n5,1\n", "line 2: gpus is '-1': must be at least 0"),
        ("seconds,gpus\nsoon,1\n5,1\n", "line 2: seconds is 'soon': must be a number"),
        ("seconds,gpus\nnan,1\n5,1\n", "line 2: seconds is 'nan': must be a finite number"),
        ("seconds,gpus\n0,1\n5,1\n5,2\n", "line 4: seconds is 5, but line 3 has 5; each row must be later"),
        ("seconds,gpus,devices\n0,2,a a\n5,0,\n", "line 2: devices names a twice"),
        ('seconds,gpus\n0,"1\n', "is not CSV"),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        load_availability(written(tmp_path, text))
    assert words in str(error.value) and "trace.csv" in str(error.value)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.sampled_from('seconds,gpus\n0123456789.-e" \x00é'), max_size=60))
def test_any_text_is_read_or_refused_in_words(tmp_path: Path, text: str) -> None:
    try:
        rows = load_availability(written(tmp_path, f"seconds,gpus\n{text}"))
    except ValueError as error:
        assert "trace.csv" in str(error)
    else:
        assert len(rows) >= 2


def test_which_devices_leave_or_come_depends_on_the_seed_only(tmp_path: Path, cluster: Topology) -> None:
    rows = load_availability(written(tmp_path, "seconds,gpus\n5,3\n15,3\n25,1\n35,4\n45,0\n55,2\n60,1\n"))
    changes, seconds = available_devices(rows, cluster, seed=1)
    assert seconds == 55.0
    assert [(change.seconds, len(change.devices)) for change in changes] == [(0, 3), (20, 1), (30, 4), (40, 0), (50, 2)]
    assert changes[1].devices < changes[0].devices < changes[2].devices
    assert (changes, seconds) == available_devices(rows, cluster, seed=1)
    assert len({tuple(available_devices(rows, cluster, seed=seed)[0]) for seed in range(20)}) > 1


def test_devices_by_name(tmp_path: Path, cluster: Topology) -> None:
    first, second = (node.name for node in cluster.nodes)
    text = f"seconds,gpus,devices\n0,3,{second} {first}/1\n9,1,{first}/0\n12,1,{first}/1\n20,0,\n"
    changes, _ = available_devices(load_availability(written(tmp_path, text)), cluster)
    assert [set(change.devices) for change in changes] == [{1, 2, 3}, {0}, {1}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("5,5,{0} {1}", "line 3 of the trace has 5 gpus, but the cluster has 4 devices; give a larger cluster"),
        ("5,1,{0}/2", "line 3 of the trace names {0}/2, which the cluster does not have; did you mean"),
        ("5,1,xyz", "names xyz, which the cluster does not have; a device is named NODE/NUMBER, from 0"),
        ("5,3,{0} {0}/1", "names device 1 of the cluster twice"),
        ("5,1,{0}", "line 3 of the trace has 1 gpus, but names 2 devices"),
    ],
)
def test_rows_that_the_cluster_cannot_have(tmp_path: Path, cluster: Topology, row: str, words: str) -> None:
    names = [node.name for node in cluster.nodes]
    path = written(tmp_path, f"seconds,gpus,devices\n0,0,\n{row.format(*names)}\n")
    with pytest.raises(ValueError) as error:
        available_devices(load_availability(path), cluster)
    assert words.format(*names) in str(error.value)
