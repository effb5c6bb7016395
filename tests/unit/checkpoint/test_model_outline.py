"""Names, layers and groups of a model's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colossal_hetero.checkpoint.model_outline import outline_of
from colossal_hetero.checkpoint.restoring import check_same_model
from colossal_hetero.checkpoint.run_states import as_bytes, from_bytes, matching_groups
from tests.support.language_models import gpt2
from tests.support.model_families import BUILDERS
from tests.support.training import tiny_vit


def test_tensors_belong_to_layers_and_tied_ones_occur_once() -> None:
    outline = outline_of(gpt2())
    assert outline.names["lm_head.weight"] == "transformer.wte.weight" and "lm_head.weight" not in outline.shapes
    assert list(dict.fromkeys(outline.layers.values())) == ["embedding", "block-0000", "block-0001", "head"]
    assert outline.layers["transformer.ln_f.bias"] == "head"
    assert outline_of(tiny_vit()).layers["cls_token"] == "embedding"


def test_a_model_without_a_row_of_blocks_has_a_layer_for_each_module() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model.register_buffer("passing", torch.zeros(2), persistent=False)
    outline = outline_of(model)
    assert set(outline.layers.values()) == {"0", "1"}
    assert outline.shapes["1.num_batches_tracked"] == () and "passing" not in outline.shapes


def test_a_model_with_two_rows_of_blocks_has_their_blocks_as_layers() -> None:
    model, _ = BUILDERS["t5"]()
    layers = outline_of(model).layers
    assert layers["encoder.block.1.layer.0.SelfAttention.q.weight"] == "encoder-block-1"
    assert layers["decoder.final_layer_norm.weight"] == "decoder-final_layer_norm"


def test_the_checkpoint_of_another_model_is_refused() -> None:
    outline = outline_of(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)))
    saved = {f"param.{name}": shape for name, shape in outline.shapes.items()}
    check_same_model(outline, saved)
    other = {**saved, "param.0.weight": (3, 5), "param.2.weight": (1,)}
    del other["param.1.bias"]
    with pytest.raises(
        ValueError, match=r"it lacks 1.bias; it has 2.weight, .*; 0.weight has shape \[3, 5\] there and \[3, 2\] here"
    ):
        check_same_model(outline, other)


def test_groups_are_matched_by_the_names_of_their_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    names = [name for name, _ in model.named_parameters()]
    groups = [dict(params=[parameter]) for parameter in model.parameters()]
    outline = outline_of(model, torch.optim.SGD(groups, lr=0.1))
    assert matching_groups(outline, [[name] for name in reversed(names)]) == [3, 2, 1, 0]
    with pytest.raises(ValueError, match=r"no state of 1.bias and 0 other parameters"):
        matching_groups(outline, [[name] for name in names[:-1]])
    with pytest.raises(ValueError, match="group 1 are in its groups 0, together with others"):
        matching_groups(outline, [names])
    with pytest.raises(ValueError, match="2 parameters of the optimizer are not in the model"):
        outline_of(nn.Linear(2, 3), torch.optim.SGD(nn.Linear(2, 3).parameters(), lr=0.1))


def test_states_are_saved_without_code() -> None:
    state = {"a": (1, None), 3: torch.arange(2), "lr": [0.5]}
    found = from_bytes(as_bytes(state, "the state"))
    assert torch.equal(found.pop(3), torch.arange(2)) and found == {"a": (1, None), "lr": [0.5]}
    with pytest.raises(ValueError, match="the schedule cannot be saved in a layer checkpoint"):
        as_bytes({"lambda": print}, "the schedule")
