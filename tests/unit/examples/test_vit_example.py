"""The ViT example's command line, its models and its folders of images, without ranks."""

import pytest
import torch
from PIL import Image

from colossal_hetero import BalanceConfig, Pruning
from colossal_hetero.balance.config import PAPER_METHODS
from colossal_hetero.profiling.named_profile import build_model
from examples.common.images import find_data
from examples.common.options import UsageError
from examples.common.tensor_parallel import Layout
from examples.vit.model import build_chosen_vit, check_model
from examples.vit.options import VitOptions, check_options, parse_options


def options(line: str = "") -> VitOptions:
    return parse_options(line.split())


def test_ranks_are_divided() -> None:
    for line, world_size, layout in (
        ("", 2, Layout(tp=2, pp=1, dp=1, local_batch=64, microbatches=1)),
        ("--pp 2", 4, Layout(tp=2, pp=2, dp=1, local_batch=64, microbatches=4)),
        ("--pp 2 --batch-size 63", 2, Layout(tp=1, pp=2, dp=1, local_batch=63, microbatches=3)),
        ("--tp 2", 4, Layout(tp=2, pp=1, dp=2, local_batch=32, microbatches=1)),
    ):
        assert check_options(options(line), world_size) == layout
        assert check_options(options("--tp 2"), 4).tp_groups == [[0, 1], [2, 3]]  # consecutive ranks


def test_the_balancing_flags_reach_the_plugin():
    """All modes take all flags; what a mode does not use is left out."""
    for mode in ("off", "resize", "migrate", "semi", "auto"):
        chosen = options(f"--balance {mode} --migration scatter-gather --max-resize 0.25 --seed 3")
        migration = {"migration": "scatter-gather"} if mode in ("migrate", "semi", "auto") else {}
        pruning = {"pruning": Pruning(seed=3)} if mode in ("resize", "semi", "auto") else {}
        assert chosen.balance_config() == BalanceConfig(mode=mode, max_resize=0.25, **migration, **pruning)
        # Without the flags the defaults of the package apply.
        assert options(f"--balance {mode}").balance_config().rules == BalanceConfig(mode=mode).rules
    for name in PAPER_METHODS:
        seed = {} if name == "mig" else {"seed": 3}
        assert options(f"--paper {name} --seed 3").balance_config() == BalanceConfig.paper(name, **seed)


def test_models_of_timm_are_adapted_and_those_of_the_paper_have_their_size():
    chosen = options("--model vit_tiny_patch16_224 --patch 8")  # adapted to the image size
    check_model(chosen, Layout(3, 1, 1, 64, 1))
    assert build_chosen_vit(chosen, classes=5)(torch.zeros(1, 3, 32, 32)).shape == (1, 5)
    for name, billions in (("vit-1b", 1.2), ("vit-3b", 2.7)):  # those of SEMI
        chosen = options(f"--model {name}")
        check_options(chosen, 8)
        with torch.device("meta"):
            model = build_chosen_vit(chosen, classes=10)
        assert sum(each.numel() for each in model.parameters()) == pytest.approx(billions * 1e9, rel=0.02)
        assert len(model.pos_embed[0]) == 64
        # ``colossal-hetero profile --model`` builds the same.
        shapes, ours = build_model(name, device="meta").model.state_dict(), model.state_dict()
        assert {key: value.shape for key, value in shapes.items()} == {key: value.shape for key, value in ours.items()}


def test_unusable_folders_of_images_are_reported(tmp_path):
    for number, (train, test, says) in enumerate(
        (
            ({}, {"cat": 1}, "no train/"),
            ({"cat": 1, "dog": 0}, {"cat": 1, "dog": 1}, "without images"),
            ({"cat": 1, "dog": 1}, {"cat": 1, "cow": 1}, "cow, dog"),
            ({"cat": 3}, {"cat": 1}, "at least two"),
            ({"cat": 3, "dog": 3}, {"cat": 1, "dog": 1}, "--batch-size 64"),
        )
    ):
        root = tmp_path / str(number)
        for split, classes in (("train", train), ("test", test)):
            for name, count in classes.items():
                (root / split / name).mkdir(parents=True)
                for index in range(count):
                    Image.new("RGB", (32, 64)).save(root / split / name / f"{index}.png")
        with pytest.raises(UsageError, match=says):
            find_data(options(f"--data folder --data-dir {root}"), 64)
