"""Batches of a training loop, with and without worker processes: every sample once, whatever the division is."""

import copy
import itertools
import pickle
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from colossal_hetero.data_parallel.loader import HeteroDataLoader, make_loader
from colossal_hetero.data_parallel.resumable_loader import ResumableDataLoader, make_resumable
from colossal_hetero.data_parallel.sampler import Division, GlobalBatchSampler, SeededSamples
from tests.support.random_examples import IS_THOROUGH

# `make test` gives each pytest process a share of the cores. If this is one core, torch warns about two workers.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

WORKERS = [{"num_workers": 0}, {"num_workers": 2}, {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 3}]
workers = pytest.mark.parametrize("workers", WORKERS, ids=["none", "two", "persistent"])


class Numbers(Dataset[int]):
    """Every sample is its index; reading a sample in ``broken`` fails."""

    def __init__(self, size: int, broken: tuple[int, ...] = ()) -> None:
        self.size = size
        self.broken = broken

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        if index in self.broken:
            raise OSError(f"sample {index} cannot be read")
        return index


class Draws(Numbers):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])


def uneven(samples: int) -> list[list[int]]:
    """Rank 0 runs three micro-steps and rank 1 runs one; rank 1 gets no samples of the last, smaller global batch."""
    return [[3, 2, 1], [samples - 6]] if samples > 6 else [[samples], [0]]


def even(samples: int) -> list[list[int]]:
    return [[samples - samples // 2], [samples // 2]]


def loaders(size: int = 32, batch: int = 9, division: Any = uneven, **options: Any) -> list[HeteroDataLoader]:
    made = [make_loader(Numbers(size), batch, rank, 2, **{"shuffle": True, **options}) for rank in range(2)]
    for loader in made:
        loader.divide_by(division)
    return made


def train(loader: HeteroDataLoader, global_batches: int | None = None) -> list[list[int]]:
    """Run a training loop for ``global_batches`` global batches, or to the end, and return the samples of each."""
    found: list[list[int]] = []
    expected_step = 0
    for batch in loader:
        assert loader.current is not None and loader.current.step == expected_step
        if expected_step == 0:
            found.append([])
        assert len(batch) == max(loader.current.samples, 1)
        found[-1] += batch.tolist()[: loader.current.samples]
        expected_step += 1
        if loader.current.is_last:
            loader.finish_global_batch()
            assert loader.state_dict()["global_batches_done"] == loader.current.global_batch + 1
            expected_step = 0
            if len(found) == global_batches:
                break
    return found


def flat(parts: Iterable[list[int]]) -> list[int]:
    return list(itertools.chain.from_iterable(parts))


def together(parts: list[list[list[int]]]) -> list[list[int]]:
    return [flat(shares) for shares in zip(*parts, strict=True)]


PLACES = [(0, 1, 3, 4)] * 3 if IS_THOROUGH else [(0, 1, 3, 4), (1,), (0, 3)]
"""Starting workers is slow, so in `make test` each kind of workers resumes at few places only."""
RESUMED = [(kind, done) for kind, places in zip(WORKERS, PLACES, strict=True) for done in places]


@pytest.mark.parametrize("workers, done", RESUMED)
def test_a_resumed_epoch_equals_the_uninterrupted_one(workers: dict[str, Any], done: int) -> None:
    """The state is saved in the middle of a global batch, after more were drawn ahead; then the division changes."""
    whole = [together([train(loader) for loader in made]) for made in [loaders()] for _ in range(3)]
    interrupted = loaders(**workers)
    states = []
    for loader in interrupted:
        train(loader)
        iterator = iter(loader)
        while loader.state_dict()["global_batches_done"] < done:
            next(iterator)
            if loader.current.is_last:  # type: ignore[union-attr]
                loader.finish_global_batch()
        next(iterator, None)
        states.append(loader.state_dict())
    assert states[0] == states[1]
    resumed = loaders(division=even, **workers)
    for loader in resumed:
        loader.load_state_dict(states[0])
        loader.set_epoch(1)
    assert together([train(loader) for loader in resumed]) == whole[1][done:]
    assert together([train(loader) for loader in resumed]) == whole[2]


def drawn(count: int, weight: float = 1.0) -> HeteroDataLoader:
    """A loader of which so many micro-batches were drawn."""
    loader = loaders()[0]
    loader.weigh_by(lambda batch: weight)
    loader.iteration = iter(loader)  # type: ignore[attr-defined]
    for _ in range(count):
        next(loader.iteration)  # type: ignore[attr-defined]
    return loader


@workers
def test_an_older_iteration_is_no_longer_valid(workers: dict[str, Any]) -> None:
    """A loaded state begins the same epoch again; an epoch that is left early is followed by the next."""
    whole = [train(loader) for loader in [loaders()[0]] for _ in range(2)]
    loader = loaders(**workers)[0]
    state, iterator = loader.state_dict(), iter(loader)
    first = next(iterator).tolist()
    loader.load_state_dict(state)
    assert loader.current is None
    with pytest.raises(RuntimeError, match="no longer valid"):
        next(iterator)
    iterator = iter(loader)
    assert next(iterator).tolist() == first
    for _ in range(4):
        if loader.is_last:
            loader.finish_global_batch()
        next(iterator)
    assert loader.current.global_batch == loader.current.step == 1  # type: ignore[union-attr]
    following = iter(loader)
    assert loader.current is None
    with pytest.raises(RuntimeError, match="another one began"):
        next(iterator)
    assert torch.cat(list(following)).tolist() == flat(whole[1])
    assert loader.batch_sampler.epoch == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("way", ["by_global_batch", "rest_of_epoch"])
def test_a_loop_may_have_one_turn_for_each_global_batch(way: str) -> None:
    def run(loader: HeteroDataLoader) -> list[list[int]]:
        """The samples of each global batch; the body of ``rest_of_epoch`` draws as many micro-batches as there are."""
        found: list[list[int]] = []
        for batches in getattr(loader, way)():
            found.append([])
            while way == "rest_of_epoch" and (not found[-1] or not loader.is_last):
                found[-1] += next(batches).tolist()
            for batch in batches if way == "by_global_batch" else ():
                found[-1] += batch.tolist()
            assert loader.is_last
            loader.finish_global_batch()
        return found

    whole, plain, resumed = (loaders()[0] for _ in range(3))
    epoch = run(whole)
    assert epoch == train(plain) and len(epoch) == whole.global_batches > 2
    for done in (0, 2, len(epoch)) if way == "rest_of_epoch" else (0, 2):
        resumed.load_state_dict({**whole.state_dict(), "epoch": 0, "global_batches_done": done})
        resumed.set_epoch(0)
        assert run(resumed) == epoch[done:]  # a process that joins after the last one has nothing to do in this epoch
        assert resumed.state_dict()["global_batches_done"] == len(epoch)


def test_finishing_a_global_batch() -> None:
    loader = loaders()[0]
    for _ in loader:
        pass
    for _ in range(2):
        loader.finish_global_batch()  # after the loop has ended
    state = loader.state_dict()
    assert state["epoch"] == 0 and state["global_batches_done"] == loader.global_batches
    following = next(iter(loader)).tolist()
    loader.load_state_dict(state)
    assert next(iter(loader)).tolist() == following


@workers
def test_a_batch_that_fails_ends_the_iteration(workers: dict[str, Any]) -> None:
    """The loops of other ranks do not skip this batch, so this loop must not skip it either."""
    loader = make_loader(Numbers(8, broken=(2,)), 4, 0, 1, **workers)
    loader.divide_by(lambda samples: [[1] * samples])
    iterator = iter(loader)
    next(iterator), next(iterator)
    with pytest.raises(OSError, match="sample 2"):
        next(iterator)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="a batch failed"):
            next(iterator)
    if workers["num_workers"]:
        # The error's traceback makes a reference cycle. If the workers end only when the cycle is collected, torch
        # waits for seconds.
        iterator._batches._shutdown_workers()  # type: ignore[attr-defined]


def test_the_length_means_optimizer_steps_and_batches_or_is_refused() -> None:
    loader = make_loader(Numbers(10), 4, 0, 2)
    assert len(loader) == 3
    loader = loaders()[0]
    assert loader.micro_batches == len(list(loader)) == 10 and loader.global_batches == 4
    for ask in (len, lambda loader: len(iter(loader))):
        with pytest.raises(TypeError, match=r"4 optimizer steps .* in 10 batches"):
            ask(loader)
    loader.divide_by(lambda samples: [[samples], [0]])
    assert len(loader) == len(iter(loader)) == len(list(loader)) == 4  # type: ignore[arg-type]


def test_means_are_kept_apart_by_their_names(monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: None)
    for division in ([[9], [0]], [[5, 4], [0, 0]]):
        loader = make_loader(Numbers(18), 9, 0, 2)
        loader.divide_by(lambda samples, division=division: division)
        means = [(loader.mean(each.float().mean()), loader.mean((each % 2).float().mean(), "odd")) for each in loader]
        assert [each for each in means if None not in each] == [
            pytest.approx((4.0, 4 / 9)),
            pytest.approx((13.0, 5 / 9)),
        ]


@pytest.mark.parametrize("options", [{}, {"worker_init_fn": lambda worker: random.seed(99)}], ids=["ours", "users"])
def test_workers_are_seeded(options: dict[str, Any]) -> None:
    loader = make_loader(Draws(4), 4, 0, 1, seed=5, num_workers=1, **options)
    loader.divide_by(lambda samples: [[samples]])
    found = next(iter(loader))[0].tolist()
    assert found[0] == pytest.approx(random.Random(99 if options else 5).random())
    if not options:
        assert found[1] == pytest.approx(np.random.RandomState(5).rand())
        assert found[2] == torch.rand((), generator=torch.Generator().manual_seed(5)).item()


def test_weights_of_batches() -> None:
    loader = make_loader(Numbers(6), 3, 0, 1)
    loader.divide_by(lambda samples: [[2, 1]])
    loader.weigh_by(lambda batch: batch.sum())
    weights = [loader.current.weight for _ in loader]  # type: ignore[union-attr]
    assert weights == [1.0, 2.0, 7.0, 5.0]


SIZE, GLOBAL_BATCH = 50, 12


def replicas(count: int, **options: Any) -> list[ResumableDataLoader]:
    found: list[Any] = []
    for rank in range(count):
        sampler: DistributedSampler[int] = DistributedSampler(range(SIZE), count, rank, shuffle=True, drop_last=True)  # type: ignore[arg-type]
        loader = DataLoader(list(range(SIZE)), GLOBAL_BATCH // count, sampler=sampler, drop_last=True, **options)
        found.append(make_resumable(loader))
    return found


def global_batches(loaders: list[ResumableDataLoader], epoch: int, stop: int | None = None) -> list[set[int]]:
    drawn = []
    for loader in loaders:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        drawn.append(list(itertools.islice(loader, stop)))
    return [set(torch.cat(batches).tolist()) for batches in zip(*drawn, strict=True)]


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
    # A loader with another sampler is left as it is.
    loader = DataLoader(list(range(4)), sampler=SequentialSampler(range(4)))
    assert type(make_resumable(loader)) is DataLoader


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


def batches_of(draws: list[Drawn]) -> dict[int, list[int]]:
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
        assert batches_of(draws) == expected(size, batch, epoch, shuffle, drop_last)


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
        assert batches_of([list(sampler.micro_batches()) for sampler in resumed]) == rest
    draws = [list(sampler.micro_batches()) for sampler in resumed]
    assert batches_of(draws) == expected(size, batch, epoch + 1, shuffle, drop_last)
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
