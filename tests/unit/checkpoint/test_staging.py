"""The memory from which saves are written: its content, and how CUDA is told about it."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import Tensor

from colossal_hetero.checkpoint.pieces import Box, TensorPiece
from colossal_hetero.checkpoint.staging import StagingBuffer, Worker
from tests.support.fake_cuda import FakeCuda


def piece(data: Tensor) -> TensorPiece:
    return TensorPiece("l", "param.a", tuple(data.shape), Box((0,) * data.dim(), tuple(data.shape)), data, "whole")


def pieces(length: int = 5) -> list[TensorPiece]:
    return [piece(torch.arange(float(length))), piece(torch.arange(6.0).view(2, 3).t()), piece(torch.empty(0))]


def assert_copied(staging: StagingBuffer, expected: list[TensorPiece]) -> None:
    for each, copied in zip(expected, staging.copy(expected), strict=True):
        assert copied.tobytes() == each.data.contiguous().numpy().tobytes()


def test_pieces_of_a_cpu_are_copied() -> None:
    staging = StagingBuffer()
    assert_copied(staging, pieces())
    assert_copied(staging, pieces(500))
    assert_copied(staging, [])


def test_pieces_of_a_gpu_go_to_registered_memory_that_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    staging = StagingBuffer()
    assert_copied(staging, pieces())
    assert_copied(staging, pieces(4))
    (first,) = cuda.memory
    assert first[0] == "register" and first[1] % 4096 == 0
    assert_copied(staging, pieces(5000))
    assert [what for what, _ in cuda.memory] == ["register", "unregister", "register"]
    assert cuda.memory[1][1] == first[1]
    assert cuda.main.done == ["event", "event", "synchronized", "event"]  # before memory goes, copies to it end
    copied = staging.copy(pieces())
    del staging
    gc.collect()
    assert cuda.main.done[-1] == "synchronized" and len(cuda.memory) == 3  # somebody still reads it
    del copied
    gc.collect()
    assert cuda.memory[3] == ("unregister", cuda.memory[2][1])


def test_memory_that_cannot_be_registered_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.refuses = True
    staging = StagingBuffer()
    for _ in range(2):
        assert_copied(staging, pieces())
    del staging
    gc.collect()
    assert cuda.memory == []


def test_a_worker_that_is_closed_is_idle() -> None:
    worker, done = Worker("test"), list[int]()
    worker.submit(lambda: done.append(1))
    worker.close()
    assert done == [1] and worker.is_idle and worker.wait(time.monotonic() + 10.0)
