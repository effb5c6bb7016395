"""What `colossal-hetero launch` tells a worker, and what a worker says when something else has started it."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from colossal_hetero.elastic.environment import ElasticEnvironment, parse_address
from colossal_hetero.elastic.supervisor.supervise import python_command, worker_environment

PLACE = ElasticEnvironment("10.0.0.5", 29400, "job-1", "node.a", local_rank=1, local_world_size=2)


def test_a_worker_reads_what_the_supervisor_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    inherited = {"RANK": "3", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "y", "PATH": "/bin"}
    written = worker_environment(inherited, PLACE)
    assert written == {"PATH": "/bin", "OMP_NUM_THREADS": "1", **PLACE.variables()}
    assert ElasticEnvironment.from_environ(written) == PLACE
    assert worker_environment({"OMP_NUM_THREADS": "4"}, PLACE)["OMP_NUM_THREADS"] == "4"
    for name, value in PLACE.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert ElasticEnvironment.from_environ() == PLACE


def test_addresses() -> None:
    assert parse_address("store.example:29400") == ("store.example", 29400)
    ipv6 = ElasticEnvironment("fe80::1%eth0", 1, "j", "n", 0, 1)
    assert ipv6.variables()["COLOSSAL_HETERO_STORE"] == "[fe80::1%eth0]:1"
    assert ElasticEnvironment.from_environ(ipv6.variables()) == ipv6
    for wrong in ("host", "host:", ":1", "::1:29400", "host:port", "host:0", "host:65536", "a b:1", "host:1\n"):
        with pytest.raises(ValueError, match="valid"):
            parse_address(wrong)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"TORCHELASTIC_RUN_ID": "1"}, "started by torchrun.*colossal-hetero launch --store.*recovery='restart'"),
        (
            {"COLOSSAL_HETERO_STORE": None, "MASTER_ADDR": "h"},
            "MASTER_ADDR.*colossal-hetero launch.*recovery='restart'",
        ),
        ({"COLOSSAL_HETERO_STORE": None}, "COLOSSAL_HETERO_STORE.*missing.*colossal-hetero launch"),
        ({"LOCAL_RANK": None, "COLOSSAL_HETERO_JOB": None}, "COLOSSAL_HETERO_JOB, LOCAL_RANK is not"),
        ({"COLOSSAL_HETERO_STORE": "host"}, "COLOSSAL_HETERO_STORE: 'host' does not have the form HOST:PORT"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK='one' is not a whole number"),
        ({"LOCAL_RANK": "2"}, "local rank 2 is not possible with 2 workers"),
        ({"COLOSSAL_HETERO_NODE": "a/b"}, "'a/b' cannot be the name of a node"),
        ({"COLOSSAL_HETERO_JOB": ""}, "'' cannot be the name of a job"),
    ],
)
def test_wrong_environments_are_refused_in_words(changes: dict[str, str | None], message: str) -> None:
    changed = {**PLACE.variables(), **changes}
    environ = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ValueError, match=re.compile(message, re.DOTALL)):
        ElasticEnvironment.from_environ(environ)


def test_the_supervisor_and_the_notices_need_no_torch() -> None:
    code = (
        "import sys, colossal_hetero.cli.main, colossal_hetero.elastic.notices\n"
        "import colossal_hetero.elastic.supervisor.guard\n"
        "print([name for name in ('torch', 'colossalai', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_command_of_a_worker() -> None:
    python, *rest = python_command("a.b", ["--x", "1"], is_module=True)
    assert python.rpartition("/")[2].startswith("python") and rest == ["-u", "-m", "a.b", "--x", "1"]
    assert python_command("a.py", [])[1:] == ["-u", "a.py"]
