"""Search of a world's workers for each other in a store that still has what former worlds wrote.

[Note: handshake] The keys of torch's own way (``env://``) contain how often torchrun has restarted workers after
errors. Nodes count from zero when they join, and the others do not count this, so that workers would read keys of a
former world, or wait for ever. So each worker writes a number that nobody has written before, and rank 0 writes all
that it finds. A rank that sees its own confirms it, and rank 0 starts the world when all have confirmed; until then, it
looks whether a number has changed.
"""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, NamedTuple

PAUSE_SECONDS = 0.02


class Greeting(NamedTuple):
    token: str
    """Token that no other world has."""
    nodes: tuple[str, ...]
    """Node of each rank, as torchrun counts ranks."""


def find_each_other(store: Any, rank: int, size: int, node: str, limit_seconds: float) -> Greeting:
    """Find the other workers through torch's ``store``; all of them call it at once. See [Note: handshake]."""
    deadline = time.monotonic() + limit_seconds
    own = f"{secrets.token_hex(8)} {node}"
    store.set(_key(size, f"here/{rank}"), own)
    greeting = _invite(store, size, deadline) if rank == 0 else _answer(store, rank, size, own, deadline)
    if greeting is None:
        raise RuntimeError(f"not all of {size} workers came within {limit_seconds:g} s (this is rank {rank})")
    return greeting


def _invite(store: Any, size: int, deadline: float) -> Greeting | None:
    keys, there, token = [_key(size, f"here/{rank}") for rank in range(size)], list[str](), ""
    while time.monotonic() < deadline:
        if store.check(keys):
            now = [store.get(key).decode() for key in keys]
            if now != there:
                there, token = now, secrets.token_hex(8)
                store.set(_key(size, "world"), json.dumps([token, there]))
            elif all(store.check([_key(size, f"{token}/{rank}")]) for rank in range(1, size)):
                store.set(_key(size, f"{token}/start"), "1")
                return _greeting(token, there)
        time.sleep(PAUSE_SECONDS)
    return None


def _answer(store: Any, rank: int, size: int, own: str, deadline: float) -> Greeting | None:
    confirmed = ""
    while time.monotonic() < deadline:
        if store.check([_key(size, "world")]):
            token, there = json.loads(store.get(_key(size, "world")))
            if there[rank] == own:
                if token != confirmed:
                    store.set(_key(size, f"{token}/{rank}"), "1")
                    confirmed = token
                if store.check([_key(size, f"{token}/start")]):
                    return _greeting(token, there)
        time.sleep(PAUSE_SECONDS)
    return None


def _greeting(token: str, there: list[str]) -> Greeting:
    return Greeting(token, tuple(each.partition(" ")[2] for each in there))


def _key(size: int, name: str) -> str:
    return f"colossal_hetero/{size}/{name}"
