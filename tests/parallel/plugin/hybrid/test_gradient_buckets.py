"""In which plans Colossal-AI holds a copy of the gradients in buckets, as the planner counts it."""

from __future__ import annotations

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests.support.harness import run_ranks
from tests.support.training import batch, boost, loss_of, ours, sgd


def bucket_share(pp_size: int) -> float:
    """Bytes of buckets beside the gradients, per byte of the rank's parameters."""
    run = boost(ours(tp_size=1, pp_size=pp_size, num_microbatches=pp_size), make_optimizer=sgd)
    wrapped = run.model.module
    if not isinstance(wrapped, DistributedDataParallel):
        return 0.0
    images, labels = batch()
    run.booster.backward(loss_of(run.model(images), labels), run.optimizer)
    parameters = list(wrapped.parameters())
    facts = wrapped._get_ddp_logging_data()
    # If gradients were views of the buckets, there would be no copy.
    assert not facts["gradient_as_bucket_view"]
    assert len({each.grad.untyped_storage().data_ptr() for each in parameters}) == len(parameters)
    buckets = sum(int(size) for size in facts["bucket_sizes"].split(","))
    return buckets / sum(each.numel() * each.element_size() for each in parameters)


@pytest.mark.parametrize(("ranks", "stages", "share"), [(1, 1, 1.0), (2, 1, 1.0), (2, 2, 0.0)])
def test_buckets_hold_a_copy_of_the_gradients_without_a_pipeline(ranks: int, stages: int, share: float) -> None:
    assert run_ranks(ranks, bucket_share, stages) == [share] * ranks
