"""The store for messages of saves is on the machine of rank 0."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch.distributed as dist

from colossal_hetero.checkpoint import layer_checkpoint
from tests.support.harness import run_ranks


def message_through_store(master: str, own: str) -> bytes:
    """What rank 1 has written, as both ranks read it."""
    os.environ["MASTER_ADDR"] = master
    is_loopback = {"_is_loopback": lambda address: address == "127.0.0.1"}
    with patch.multiple(layer_checkpoint, own_address=lambda: own, STORE_SECONDS=5.0, **is_loopback):
        store = layer_checkpoint._new_store()
    assert store is not None
    if dist.get_rank() == 1:
        store.set("key", "value")
    value = store.get("key")
    dist.barrier()
    return value


@pytest.mark.parametrize(("master", "own"), [("192.0.2.1", "127.0.0.2"), ("127.0.0.1", "127.0.0.1")])
def test_the_store_of_messages_is_on_the_machine_of_rank_0(master: str, own: str) -> None:
    """192.0.2.1 is on no machine; 127.0.0.2 leads here, and stands for an address of rank 0's machine."""
    assert run_ranks(2, message_through_store, master, own) == [b"value"] * 2
