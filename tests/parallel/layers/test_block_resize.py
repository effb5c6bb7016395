"""A resized block trains an exact sub-network: the model without the pruned units."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colossal_hetero.balance.plan import BalancePlan
from colossal_hetero.balance.pruning import SAMPLED_ROWS
from tests.support.applied_plans import Training
from tests.support.checks import Checks
from tests.support.sharding import own_share
from tests.support.training import batch, loss_of, tiny_vit

checks = Checks()


@checks.on(2, 0, "norm-product")
@checks.on(2, 1, "random")
@checks.on(3, 2, "priority")
def loss_and_gradients_are_those_of_the_sub_network(slow: int, priority: str) -> None:
    """That is the model in which the output weights of all pruned units are zero."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    training = Training("block", priority=priority)
    training.applier.apply(BalancePlan.resizing([0.5 if other == slow else 0.0 for other in range(ranks)]))
    kept: dict[str, list[int]] = {}
    for block in training.blocks:
        choose = block._choose

        def remember(block=block, choose=choose) -> Tensor | None:
            chosen = choose()
            kept[block.name] = list(range(block.units)) if chosen is None else chosen.tolist()
            return chosen

        block._choose = remember
    images, labels = batch(0)
    training.applier.units.begin_pass()
    loss = loss_of(training.model(images), labels)
    training.booster.backward(loss, training.optimizer)
    gradients = {name: parameter.grad for name, parameter in training.model.unwrap().named_parameters()}

    everyone: list[dict[str, list[int]]] = [{}] * ranks
    dist.all_gather_object(everyone, kept)
    whole = tiny_vit()
    for block in training.blocks:
        holder = whole.get_submodule(block.name[block.name.index("blocks.") :])
        output = holder.proj if "attn" in block.name else holder.fc2
        columns = output.weight.unflatten(1, (ranks, block.units, -1))
        with torch.no_grad():
            for other, of_rank in enumerate(everyone):
                # Ranks that prune nothing do not choose.
                for unit in set(range(block.units)) - set(of_rank.get(block.name, range(block.units))):
                    columns[:, other, unit] = 0.0
        if rank == slow:
            assert len(kept[block.name]) == block.units - round(0.5 * block.units) < block.units
    expected = loss_of(whole(images), labels)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4), priority
    for name, parameter in training.model.unwrap().named_parameters():
        wanted = own_share(parameter, whole.get_parameter(name).grad)
        if name.endswith(("proj.weight", "fc2.weight")) and "blocks" in name:
            # The reference has a gradient at a pruned unit; the resized block has none there.
            block = next(block for block in training.blocks if block.name.endswith(name.rsplit(".", 2)[0]))
            left_out = set(range(block.units)) - set(kept.get(block.name, range(block.units)))
            view = wanted.clone().unflatten(1, (block.units, -1))
            for unit in left_out:
                view[:, unit] = 0.0
            wanted = view.flatten(1)
        difference = float((gradients[name] - wanted).norm() / (wanted.norm() + 1e-6))
        assert difference <= 1e-4, f"{priority}, {name}"


@checks.on(2)
def units_of_the_largest_norms_are_kept() -> None:
    training = Training("block", priority="norm-product")
    training.applier.apply(BalancePlan.resizing([0.5, 0.0]))
    compared = 0
    for block in training.blocks:
        x, weight = block.matrices
        if len(block.inputs) == 1 and block.places[0][0].parts == 1:
            # An MLP: choosing units in every iteration does not copy its weights.
            for matrix, layer in ((x, block.output), (weight, block.inputs[0])):
                assert matrix.data_ptr() == layer.weight.data_ptr(), block.name
        if max(len(x), len(weight)) > SAMPLED_ROWS:
            # In a block with so many rows, norms are estimated.
            continue
        by_hand = (x.norm(dim=0) * weight.norm(dim=0)).topk(block.units - round(0.5 * block.units)).indices
        if dist.get_rank() == 0:
            compared += 1
            assert block._choose().tolist() == sorted(by_hand.tolist()), block.name
    assert compared == 2 or dist.get_rank() != 0


test_on_ranks = checks.test()
