"""Training loops as sequences of calls: which micro-batch each pass belongs to, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from colossal_hetero.data_parallel.progress import LoopProgress, MicroBatch


def global_batch(index: int, parts: int) -> list[MicroBatch]:
    return [MicroBatch(1, parts, index, step, step == parts - 1) for step in range(parts)]


def draw(progress: LoopProgress, *micro_batches: MicroBatch) -> None:
    for each in micro_batches:
        progress.draw(each)


def train(progress: LoopProgress, micro_batch: MicroBatch, step: bool = True) -> bool:
    """A usual iteration with a batch whose tensors show nothing. Returns whether the optimizer steps."""
    progress.draw(micro_batch)
    assert progress.forward([]) is micro_batch and progress.backward([]) is micro_batch
    due = step and progress.step()
    if due:
        progress.finish()
    return due


def test_the_usual_loop_steps_once_per_global_batch() -> None:
    progress = LoopProgress()
    steps = [train(progress, each) for index in range(2) for each in global_batch(index, 3)]
    assert steps == [False, False, True] * 2 and not progress.must_drop


def test_a_batch_that_is_drawn_ahead_is_not_taken_for_the_current_one() -> None:
    progress, (one, two, three) = LoopProgress(), global_batch(0, 3)
    draw(progress, one, two)
    assert progress.current is one
    assert progress.forward([one]) is one and progress.backward([]) is one and not progress.step()
    draw(progress, three)
    assert progress.current is one and not progress.is_last()
    assert progress.forward([two]) is two and progress.backward([two]) is two and not progress.step()
    assert progress.forward([three]) is three and progress.is_last()
    assert progress.backward([]) is three and progress.step()


def test_several_forward_and_backward_passes_of_a_batch() -> None:
    progress, (one, two) = LoopProgress(), global_batch(0, 2)
    progress.draw(one)
    for _ in range(2):
        assert progress.forward([]) is one
    for _ in range(2):
        assert progress.backward([]) is one
    assert progress.forward([one]) is one and progress.backward([one]) is one  # a second loss with its own forward pass
    assert not progress.step()
    assert train(progress, two)


def test_losses_show_which_of_several_forward_passes_they_belong_to() -> None:
    progress, (one, two) = LoopProgress(), global_batch(0, 2)
    draw(progress, one, two)
    progress.forward([one])
    progress.forward([two])
    assert progress.backward([two]) is two and progress.backward([one]) is one


def test_an_epoch_that_is_left_in_a_global_batch_drops_its_gradients() -> None:
    progress, parts = LoopProgress(), global_batch(0, 3)
    train(progress, parts[0])
    progress.begin()
    assert progress.must_drop
    again = global_batch(0, 3)
    assert [train(progress, each) for each in again] == [False, False, True]
    assert not progress.must_drop


def test_whole_global_batches_may_be_accumulated() -> None:
    progress = LoopProgress()
    for index in range(3):
        assert train(progress, *global_batch(index, 1), step=index == 2) == (index == 2)
        assert not progress.is_within_global_batch


def test_a_loop_that_asks_for_the_last_micro_batch_may_step_there_only() -> None:
    progress = LoopProgress()
    for index in range(4):
        for each in global_batch(index, 2):
            progress.draw(each)
            progress.forward([])
            progress.backward([])
            if progress.is_last() and index % 2:
                assert progress.step()
                progress.finish()


def test_a_batch_that_is_a_whole_global_batch_can_be_trained_with_again() -> None:
    progress, (one,) = LoopProgress(), global_batch(0, 1)
    assert train(progress, one)
    for _ in range(2):
        assert progress.forward([one]) is one and progress.backward([]) is one and progress.step()
        progress.finish()


def test_passes_without_a_batch_of_the_loader_change_nothing() -> None:
    progress, (one,) = LoopProgress(), global_batch(0, 1)
    assert progress.forward([]) is None
    assert train(progress, one)
    assert progress.forward([]) is None
    assert train(progress, *global_batch(1, 1))


def own_accumulation(progress: LoopProgress) -> None:
    one, two = global_batch(0, 2)
    train(progress, one, step=False)
    progress.draw(two)
    progress.forward([])


def plain_backward(progress: LoopProgress) -> None:
    (one,) = global_batch(0, 1)
    progress.draw(one)
    progress.forward([])
    progress.step()


def plain_backward_later(progress: LoopProgress) -> None:
    one, two = global_batch(0, 2)
    train(progress, one)
    progress.draw(two)
    progress.forward([])
    progress.step()


def no_backward(progress: LoopProgress) -> None:
    progress.step()


def no_forward(progress: LoopProgress) -> None:
    progress.draw(*global_batch(0, 1))
    progress.backward([])


def left_out(progress: LoopProgress) -> None:
    one, two = global_batch(0, 2)
    draw(progress, one, two)
    progress.forward([two])


def unknown_of_two(progress: LoopProgress) -> None:
    draw(progress, *global_batch(0, 2))
    progress.forward([])


def joined_inputs(progress: LoopProgress) -> None:
    parts = global_batch(0, 2)
    draw(progress, *parts)
    progress.forward(parts)


def joined_losses(progress: LoopProgress) -> None:
    parts = global_batch(0, 2)
    draw(progress, *parts)
    for each in parts:
        progress.forward([each])
    progress.backward(parts)


def unknown_loss(progress: LoopProgress) -> None:
    parts = global_batch(0, 2)
    draw(progress, *parts)
    for each in parts:
        progress.forward([each])
    progress.backward([])


def a_part_again(progress: LoopProgress) -> None:
    one, _ = global_batch(0, 2)
    train(progress, one)
    progress.forward([one])


def an_old_part(progress: LoopProgress) -> None:
    one, two = global_batch(0, 2)
    train(progress, one)
    train(progress, two)
    progress.forward([two])


@pytest.mark.parametrize(
    "loop, words",
    [
        (own_accumulation, r"accumulates gradients over several batches by itself"),
        (plain_backward, r"micro-batch 0 of global batch 0 had no backward pass"),
        (plain_backward_later, r"micro-batch 1 of global batch 0 had no backward pass"),
        (no_backward, r"there was no backward pass"),
        (no_forward, r"no forward pass with a batch of the loader"),
        (left_out, r"micro-batch 0 of global batch 0 was drawn, but the next forward pass is that of micro-batch 1"),
        (unknown_of_two, r"2 batches were drawn"),
        (joined_inputs, r"inputs of the model were computed from several batches"),
        (joined_losses, r"loss was computed from several batches"),
        (unknown_loss, r"forward passes of several batches"),
        (a_part_again, r"is passed forward again after optimizer.step\(\)"),
        (an_old_part, r"micro-batch 1 of global batch 0 was drawn in an earlier"),
    ],
)
def test_what_would_train_to_other_weights_is_refused(loop: Callable[[LoopProgress], None], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        loop(LoopProgress())


def test_whole_global_batches_may_be_skipped() -> None:
    progress = LoopProgress()
    parts = [each for index in range(3) for each in global_batch(index, 2)]
    draw(progress, *parts[:5])
    assert progress.forward([parts[4]]) is parts[4]
