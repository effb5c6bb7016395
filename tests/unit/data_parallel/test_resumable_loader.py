"""A loader of Colossal-AI's plugin that continues within an epoch, also with another number of replicas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from colossal_hetero.data_parallel.resumable_loader import ResumableDataLoader, make_resumable

SIZE, GLOBAL_BATCH = 50, 12


def replicas(count: int, **options: Any) -> list[ResumableDataLoader]:
    """The loaders of all replicas, which share global batches of twelve samples."""
    found: list[Any] = []
    for rank in range(count):
        sampler: DistributedSampler[int] = DistributedSampler(range(SIZE), count, rank, shuffle=True, drop_last=True)  # type: ignore[arg-type]
        loader = DataLoader(list(range(SIZE)), GLOBAL_BATCH // count, sampler=sampler, drop_last=True, **options)
        found.append(make_resumable(loader))
    return found


def global_batches(loaders: list[ResumableDataLoader], epoch: int, stop: int | None = None) -> list[set[int]]:
    """The samples of each global batch of an epoch, up to the ``stop``-th."""
    batches: list[set[int]] = []
    for loader in loaders:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for number, batch in enumerate(loader):
            if number == len(batches):
                batches.append(set())
            batches[number] |= set(batch.tolist())
            if number + 1 == stop:
                break
    return batches


@pytest.mark.parametrize("workers", [{}, dict(num_workers=1), dict(num_workers=1, persistent_workers=True)])
@pytest.mark.parametrize("others", [2, 3])
def test_an_epoch_continues_after_the_batches_that_were_drawn(others: int, workers: dict[str, Any]) -> None:
    whole = [global_batches(replicas(2), epoch) for epoch in (3, 4)]
    interrupted = replicas(2)
    assert global_batches(interrupted, 3, stop=3) == whole[0][:3]
    state = interrupted[0].state_dict()
    resumed = replicas(others, **workers)
    for loader in resumed:
        loader.load_state_dict(state)
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    assert global_batches(resumed, 3) == whole[0][3:]
    assert torch.equal(torch.get_rng_state(), expected)  # as the epoch that is continued, which has drawn its number
    assert global_batches(resumed, 4) == whole[1]
    assert resumed[0].state_dict() == {**state, "epoch": 4, "global_batches_done": 4}


def test_another_epoch_or_other_data_do_not_continue() -> None:
    first, second = replicas(2), replicas(2)
    global_batches(first, 3, stop=2)
    second[0].load_state_dict(first[0].state_dict())
    assert len(global_batches(second[:1], 5)) == 4
    with pytest.raises(ValueError, match="dataset_size was 51, now it is 50"):
        second[0].load_state_dict({**first[0].state_dict(), "dataset_size": 51})
    with pytest.raises(ValueError, match=r"10 samples .* not a multiple of the 12 samples"):
        second[0].load_state_dict({**first[0].state_dict(), "global_batch_size": 5})
    with pytest.raises(ValueError, match="missing global_batches_done"):
        second[0].load_state_dict({"epoch": 0, "global_batch_size": 12})


def test_a_loader_with_another_sampler_is_left_as_it_is() -> None:
    loader = DataLoader(list(range(4)), sampler=SequentialSampler(range(4)))
    assert type(make_resumable(loader)) is DataLoader
