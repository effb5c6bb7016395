"""Every sample is drawn once, and no division changes global batches or augmentation. A sampler stands for a rank."""

import copy
import pickle
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from colossal_hetero.data_parallel.loader import make_loader
from colossal_hetero.data_parallel.sampler import Division, GlobalBatchSampler, SeededSamples

Drawn = list[tuple[Any, list[int]]]


def random_division(salt: int, ranks: int) -> Division:
    def division(samples: int) -> list[list[int]]:
        rng = random.Random(f"{salt} {samples}")
        shares: list[list[int]] = [[0] * rng.randint(1, 3) for _ in range(ranks)]
        busy = rng.sample(range(ranks), rng.randint(1, ranks))
        for _ in range(samples):
            share = shares[rng.choice(busy)]
            share[rng.randrange(len(share))] += 1
        return shares

    return division


def samplers(size: int, batch: int, ranks: int, salt: int | None = 0, **options: Any) -> list[GlobalBatchSampler]:
    options = {"shuffle": True, "seed": 7, **options}
    made = [GlobalBatchSampler(size, batch, rank, ranks, **options) for rank in range(ranks)]
    for sampler in made:
        if salt is not None:
            sampler.divide_by(random_division(salt, ranks))
    return made


def global_batches(draws: list[Drawn]) -> dict[int, list[int]]:
    """The samples of each global batch without placeholders, by rank and then by micro-step."""
    found: dict[int, list[int]] = defaultdict(list)
    for drawn in draws:
        for micro_batch, indices in drawn:
            assert len(indices) == max(micro_batch.samples, 1)
            found[micro_batch.global_batch] += indices[: micro_batch.samples]
    for drawn in draws:
        assert [micro.global_batch for micro, _ in drawn if micro.is_last] == sorted(found)
        assert all(micro.global_samples == len(found[micro.global_batch]) for micro, _ in drawn)
    return dict(sorted(found.items()))


def expected(size: int, batch: int, epoch: int, shuffle: bool = True, drop_last: bool = False) -> dict[int, list[int]]:
    whole: DistributedSampler[int] = DistributedSampler(range(size), 1, 0, shuffle=shuffle, seed=7)  # type: ignore[arg-type]
    whole.set_epoch(epoch)
    order = list(whole)
    slices = [order[first : first + batch] for first in range(0, size, batch)]
    return {k: part for k, part in enumerate(slices) if len(part) == batch or not drop_last}


sizes = st.integers(1, 60).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))
cases = st.tuples(sizes, st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 999))


@given(cases, st.data())
def test_a_new_division_keeps_the_global_batches(case: tuple, data: st.DataObject) -> None:
    """At any time, from the global batch on that no rank has drawn yet; ranks draw ahead by different amounts."""
    (size, batch), ranks, shuffle, drop_last, _, salt = case
    made = samplers(size, batch, ranks, salt, shuffle=shuffle, drop_last=drop_last)
    for epoch in range(3):
        for sampler in made:
            sampler.begin_epoch()
        iterators = [sampler.micro_batches() for sampler in made]
        draws: list[Drawn] = [[] for _ in made]
        for turn in range(data.draw(st.integers(0, 3))):
            for iterator, drawn in zip(iterators, draws, strict=True):
                for _ in range(data.draw(st.integers(0, 5))):
                    drawn += [item for item in [next(iterator, None)] if item is not None]
            drawn_last = max(sampler.drawn_global_batch for sampler in made)
            for sampler in made:
                sampler.divide_by(random_division(salt + turn + 1, ranks), from_global_batch=drawn_last + 1)
        for sampler, iterator, drawn in zip(made, iterators, draws, strict=True):
            drawn += list(iterator)
            assert sampler.epoch == epoch
        assert global_batches(draws) == expected(size, batch, epoch, shuffle, drop_last)


@given(cases, st.data())
def test_resuming_draws_the_remaining_global_batches(case: tuple, data: st.DataObject) -> None:
    (size, batch), ranks, shuffle, drop_last, epoch, salt = case
    options: dict[str, Any] = {"shuffle": shuffle, "drop_last": drop_last}
    (saved, *_) = samplers(size, batch, ranks, salt, **options)
    saved.set_epoch(epoch)
    done = data.draw(st.integers(0, saved.global_batches))
    iterator = saved.micro_batches()
    for micro_batch, _ in iterator:
        if micro_batch.global_batch == done:
            break
        saved.finish_global_batch(micro_batch.global_batch)
    state = saved.state_dict()
    resumed = samplers(size, batch, data.draw(st.integers(1, 5)), salt + 1, **options)
    told = data.draw(st.booleans())
    for sampler in resumed:
        sampler.load_state_dict(state)
        assert sampler.state_dict() == state
        if told:
            sampler.set_epoch(epoch)
    whole = expected(size, batch, epoch, shuffle, drop_last)
    rest = {k: part for k, part in whole.items() if k >= done}
    if rest or told:
        assert global_batches([list(sampler.micro_batches()) for sampler in resumed]) == rest
    draws = [list(sampler.micro_batches()) for sampler in resumed]
    assert global_batches(draws) == expected(size, batch, epoch + 1, shuffle, drop_last)
    assert [len(sampler) for sampler in resumed] == list(map(len, draws))


class Noisy(Dataset[Tensor]):
    name = "noisy"

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        noise = torch.rand(()), torch.tensor(np.random.rand()), torch.tensor(random.random())
        return torch.stack([torch.tensor(float(index)), *(each.float() for each in noise)])


def samples_of(division: Sequence[int], num_workers: int = 0, epoch: int = 0, seed: int = 7) -> Tensor:
    parts = []
    for rank in range(len(division)):
        loader = make_loader(
            *(Noisy(), 10, rank, len(division)), shuffle=True, seed=seed, num_workers=num_workers, seeds_samples=True
        )
        loader.divide_by(lambda samples: [[size] for size in division])
        loader.set_epoch(epoch)
        parts.append(list(loader))
    return torch.cat([torch.cat(batches) for batches in zip(*parts, strict=True)])


def test_samples_do_not_depend_on_the_division_but_on_epoch_and_seed() -> None:
    whole = samples_of([10])
    for division, num_workers in (((3, 7), 0), ((5, 1, 4), 0), ((3, 7), 2)):
        assert torch.equal(samples_of(division, num_workers), whole)
    assert len(torch.unique(whole[:, 1])) == len(whole)
    by_index = [each[each[:, 0].argsort()] for each in (whole, samples_of([10], epoch=1), samples_of([10], seed=8))]
    for other in by_index[1:]:
        assert torch.equal(by_index[0][:, 0], other[:, 0])
        assert not (by_index[0][:, 1:] == other[:, 1:]).any()


def test_a_wrapped_data_set_is_used_as_before_and_keeps_the_random_states_of_the_process() -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]

    loader = make_loader(Noisy(), 10, 0, 1, seeds_samples=True)
    loader.divide_by(lambda samples: [[samples]])
    batches = iter(loader)
    before = states()
    next(batches)
    assert states() == before
    data = SeededSamples(Noisy())
    for each in (data, copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert each.name == "noisy" and len(each) == 20 and each[3][0] == 3
    with pytest.raises(AttributeError, match="other"):
        _ = data.other
