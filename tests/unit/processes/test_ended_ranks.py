"""Messages of lost connections, as Gloo and NCCL word them."""

from __future__ import annotations

from colossal_hetero.common.ranks import is_lost_connection

GLOO = (
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:30331. This may "
    "indicate that the peer has crashed"
)
NCCL = (
    "NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1970, remote process exited or there was a "
    "network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote "
    "process exiting prematurely."
)
WATCHDOG = (
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
    "NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out."
)
ABORTED = "NCCL communicator was aborted on rank 0."
RESET = "Connection reset by peer"


def test_lost_connections_are_told_from_other_errors() -> None:
    assert all(map(is_lost_connection, (GLOO, NCCL, WATCHDOG, ABORTED, RESET)))
    assert not is_lost_connection("CUDA out of memory. Tried to allocate 2.00 GiB")
