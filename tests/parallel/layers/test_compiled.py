"""With ``torch.compile``, balanced layers run uncompiled, and the rest of the model is compiled."""

from __future__ import annotations

from torch import nn
from torch._dynamo.utils import counters

from tests.support.harness import run_ranks
from tests.support.migration_runs import ITERATIONS, Watch, assert_equal, seeded_migrating_run, slow
from tests.support.training import no_straggler, tiny_vit, train


def check_compiled() -> None:
    """The attention of this model has dropout inside, its MLP has not."""

    def make() -> nn.Module:
        return tiny_vit(depth=1, attn_drop_rate=0.2)

    expected = train(seeded_migrating_run(make, no_straggler), ITERATIONS)
    run = seeded_migrating_run(make, slow(1))
    for module in (run.model.unwrap().blocks[0].attn, run.model.unwrap().blocks[0].mlp):
        module.compile(backend="eager")
    watch = Watch(run)
    train(run, ITERATIONS, each=watch)
    watch.assert_migrated(1, "compiled")
    assert_equal(run, expected, "compiled")
    assert counters["frames"]["ok"] > 0


def test_migration_is_exact_in_a_compiled_model() -> None:
    run_ranks(2, check_compiled)
