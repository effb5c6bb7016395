"""One member with a store in the same process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from colossal_hetero.elastic import rendezvous
from colossal_hetero.elastic.membership import Membership
from colossal_hetero.elastic.world import JoinTimeoutError, MembershipTiming, StoreLostError
from tests.support.harness import free_port


@pytest.fixture
def port() -> Iterator[int]:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port


def test_one_line_says_that_members_are_missing(
    port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "SECONDS_PER_NOTICE", 0.1)
    member = Membership(
        "127.0.0.1", port, "j", "n", min_members=2, max_members=2, timing=MembershipTiming(join_limit_seconds=0.5)
    )
    with pytest.raises(JoinTimeoutError, match=r"no world formed within 0\.5 s: job j needs at least 2 members"):
        member.form()
    words = "colossal_hetero: waiting up to 0.5 s: job j needs at least 2 members, and 1 came (n)\n"
    assert capsys.readouterr().err == words


def test_wrong_arguments_and_calls(port: int) -> None:
    with pytest.raises(ValueError, match="min_members is 3 and max_members 2, but they must be 1 <= min_members"):
        Membership("127.0.0.1", port, "j", "n", min_members=3, max_members=2)
    with pytest.raises(ValueError, match="the name of the node is empty"):
        Membership("127.0.0.1", port, "j", "", max_members=2)
    member = Membership("127.0.0.1", port, "j", "n", max_members=2)
    member.leave()  # nothing to leave
    member.fail("nothing to break")
    assert member.failure is None and not member.is_somebody_waiting()
    with pytest.raises(RuntimeError, match="there is no world"):
        member.seal()
    member.depart()
    with pytest.raises(RuntimeError, match="this process has departed"):
        member.form()


def test_there_is_no_store() -> None:
    timing = MembershipTiming(store_limit_seconds=0.3)
    with pytest.raises(StoreLostError, match=r"the store at 127\.0\.0\.1:\d+ does not answer within 0\.3 s"):
        Membership("127.0.0.1", free_port(), "j", "n", max_members=1, timing=timing)
