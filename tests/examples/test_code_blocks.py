"""Each code block of README and ``docs/`` runs as it is (the first script with half of its steps), or says why not.
Scripts for Colossal-AI become scripts for this package by at most three changed lines, and then show a report."""

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import colossalai
import pytest
import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from torch import nn
from torch.utils.data import TensorDataset
from tqdm import tqdm

import colossal_hetero.testing
from colossal_hetero import ElasticConfig, HeteroHybridParallelPlugin, HeteroZeroPlugin
from colossal_hetero.planner.cluster.cluster_file import load_cluster, save_cluster
from colossal_hetero.planner.cost.layout_line import read_layout
from colossal_hetero.planner.cost.plan import save_plan
from colossal_hetero.planner.profile.layer_profile import save_profile
from colossal_hetero.planner.solver.problem import Problem
from colossal_hetero.planner.solver.search import search
from tests.parallel.doctor.test_doctor import can_limit
from tests.parallel.plugin.hybrid.test_plan_agreement import BLOCKS, cluster, profile
from tests.support.forked_python import AS_USERS, ForkedPopen
from tests.support.harness import run_ranks
from tests.support.random_examples import IS_THOROUGH
from tests.support.training import BATCH, batch, loss_of, ours, tiny_vit
from tests.support.zero_runs import unmeasured
from tools.code_blocks import PAGES, Block, blocks, outputs, prepare, run, run_process, same_form, write_cluster

MOST_LINES = 25  # of the README's first script
KINDS = ("bash", "toml", "python")


def test_every_block_is_run_or_says_why_not() -> None:
    for page in PAGES:
        shown = outputs(page).values()
        for block in blocks(page):
            if block.is_run and block.language not in (*KINDS, "mermaid") and block.mark != "layouts":
                assert block in shown, f"{block.name} is not run; say why in a comment above it: <!-- not run: … -->"


def test_clusters_and_layouts_can_be_read(tmp_path: Path) -> None:
    found = [block for page in PAGES for block in blocks(page)]
    for block in found:
        if block.language == "toml":
            write_cluster(block, tmp_path)
            assert load_cluster(tmp_path / "cluster.toml").devices, block.name
        elif block.mark == "layouts":
            assert all(read_layout(line) for line in block.text.splitlines()), block.name


def run_forked(words: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What a command or torchrun prints, and messages of the package before it, without new interpreters."""
    if IS_THOROUGH:
        return run_process(words, folder, environment)
    if words[0] == "torchrun":  # half of the first script's steps show the first change of its plan
        script = folder / words[-1]
        script.write_text(script.read_text().replace("range(40)", "range(20)"))
    modules = {"torchrun": "torch.distributed.run", "colossal-hetero": "colossal_hetero"}
    command = [sys.executable, "-m", modules[words[0]], *words[1:]]
    with pytest.MonkeyPatch.context() as context, (folder / "errors").open("w") as errors:
        context.chdir(folder)
        process = ForkedPopen(command, {**environment, AS_USERS: "1"}, stdout=subprocess.PIPE, stderr=errors)
        assert process.stdout is not None
        with process.stdout:
            text = process.stdout.read()
        said = (folder / "errors").read_text()
        assert process.wait(30) == 0, f"{words}:\n{text}\n{said}"
    return "\n".join([*(line for line in said.splitlines() if line.startswith("colossal_hetero: ")), text])


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(block.commands for block in blocks(page))], ids=lambda page: page.stem
)
def test_commands_print_what_the_page_shows(page: Path) -> None:
    shown = outputs(page)
    for block, printed in run(page, run_forked, slow=IS_THOROUGH):
        if block.is_script:
            check_first_script(block, printed, shown[block].text)
        elif block in shown:
            assert same_form(printed, shown[block].text), f"{block.name}: now it prints\n{printed}"


def check_first_script(block: Block, printed: str, shown: str) -> None:
    assert len(block.text.splitlines()) <= MOST_LINES
    assert re.search(r"^colossal_hetero: rank 1 takes .* of its work now runs on rank 0; iteration", printed), printed
    # How long all of it takes, and so whether it pays, depends on what else the machine does.
    until = "An iteration took"
    assert same_form(
        printed.partition("An iteration, by rank")[2], shown.partition("An iteration, by rank")[2].partition(until)[0]
    )
    assert re.search(r"balancing\s+saved", shown) and re.search(r"balancing\s+(saved|cost)", printed)


RANKS = {"checkpoints.md": 4}  # ranks that a page's blocks need; 2 in all other pages
SAMPLES = {"README.md": 512, "data-parallel.md": 512, "planning.md": 256}
"""Samples of the data set that a page's blocks need; 32 in all other pages."""


class Names(dict[str, Any]):
    """The names of a script that its block does not define. Those that need the block's plugin are made when used."""

    def __init__(self, block: Block) -> None:
        model = tiny_vit(depth=BLOCKS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        super().__init__(
            model=model,
            optimizer=optimizer,
            criterion=loss_of,
            dataset=TensorDataset(*batch(size=SAMPLES.get(block.page.name, 32))),
            linear=nn.Linear(8, 8),
            group=dist.group.WORLD,
            sharded_model=model,
            loss_of=lambda model, batch: loss_of(model(batch[0]), batch[1]),
            train=lambda: self["booster"].backward(loss_of(self["model"](batch()[0]), batch()[1]), self["optimizer"]),
            epochs=1,
            steps=0,
            **dict(dist=dist, nullcontext=nullcontext, tqdm=tqdm, Booster=Booster, ElasticConfig=ElasticConfig),
            HeteroHybridParallelPlugin=HeteroHybridParallelPlugin,
        )
        self["schedule"] = self["scheduler"] = torch.optim.lr_scheduler.ConstantLR(optimizer)
        if "execute_pipeline" in block.text:
            self["criterion"] = lambda outputs, inputs: loss_of(outputs, inputs[1])
        if "optimizer" in block.text and "booster.boost(" not in block.text:
            self._boost(block.page.name == "data-parallel.md")

    def _boost(self, zero: bool) -> None:
        plugin = HeteroZeroPlugin(1, global_batch_size=16) if zero else ours(tp_size=2)
        self["plugin"] = plugin
        loader = plugin.prepare_dataloader(self["dataset"], batch_size=None if zero else BATCH)
        names = ("model", "optimizer", "criterion", "loader")
        boosted = self["booster"].boost(self["model"], self["optimizer"], self["criterion"], loader)
        self.update(zip(names, boosted, strict=False))

    def __missing__(self, name: str) -> Any:
        if name == "booster":
            self[name] = Booster(plugin=self["plugin"])
        elif name in ("loader", "dataloader"):
            plan = getattr(self["plugin"], "plan", None)
            size = BATCH if plan is None else SAMPLES["planning.md"] // len(plan.replicas)
            self[name] = self["plugin"].prepare_dataloader(self["dataset"], batch_size=size)
        else:
            raise KeyError(name)
        return self[name]


@unmeasured
@patch.object(
    HybridParallelPlugin, "__del__", lambda plugin: None
)  # one rank would destroy groups that another still makes
def run_python(page: Path, folder: Path) -> int:
    os.chdir(folder)
    if not can_limit():  # CPU control groups need root
        colossal_hetero.testing.cpu_quota = lambda share: nullcontext()  # type: ignore[assignment]
    done = []
    for block in blocks(page):
        if block.language == "python" and block.is_run and not block.is_script:
            text = re.sub(r"/(shared|nvme|nfs)/", f"{folder}/", block.text)
            done.append(Names(block))
            try:
                exec(compile(text, block.name, "exec"), {}, done[-1])
            except Exception as error:
                error.add_note(f"in {block.name}")
                raise
            dist.barrier()
    return len(done)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")], ids=lambda page: page.stem
)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    topology, layers = cluster((1.0, 0.5)), profile()
    save_cluster(topology, tmp_path / "cluster.toml")
    save_profile(layers, tmp_path / "profile.json")
    plan = search(Problem(topology=topology, profile=layers, global_batch=16)).plans[0].plan
    save_plan(plan, tmp_path / "plan.json")
    prepare(tmp_path)
    run_ranks(RANKS.get(page.name, 2), run_python, page, tmp_path)


# Conversion ----------------------------------------------------------------------------------------------------------


BEGIN = """
import colossalai
import torch
from colossalai.booster import Booster
from colossalai.booster.plugin import {plugin}

colossalai.launch_from_torch(verbose=False)
"""
STEP = """
    optimizer.step()
    optimizer.zero_grad()
"""
TOKENS = """
booster = Booster(plugin=plugin)
model, optimizer, *_ = booster.boost(model, optimizer)
for step in range(9):
    tokens = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(step))"""
HYBRID = BEGIN.format(plugin="HybridParallelPlugin")
REPORT = "plugin.report().print()\n"

SCRIPTS = {
    "BERT": f"""{HYBRID}
from transformers import BertConfig, BertForSequenceClassification
sizes = dict(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
model = BertForSequenceClassification(BertConfig(**sizes))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32"){TOKENS}
    booster.backward(model(tokens, labels=tokens[:, 0] % 2).loss, optimizer){STEP}""",
    "ZeRO": f"""{BEGIN.format(plugin="LowLevelZeroPlugin")}
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
plugin = LowLevelZeroPlugin(stage=1, precision="bf16")
loader = plugin.prepare_dataloader(data, batch_size=8, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = torch.nn.CrossEntropyLoss()
booster = Booster(plugin=plugin)
model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
for inputs, labels in loader:
    booster.backward(criterion(model(inputs.bfloat16()).float(), labels), optimizer){STEP}""",
    "pipeline": f"""{HYBRID}
from transformers import LlamaConfig, LlamaForCausalLM
sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32"){TOKENS}
    batch = iter([dict(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))])
    booster.execute_pipeline(batch, model, lambda outputs, _: outputs.loss, optimizer, return_loss=True){STEP}""",
}


def converted(text: str) -> str:
    theirs, ours, more = "HybridParallelPlugin", "HeteroHybridParallelPlugin", ""
    if theirs not in text:
        theirs, ours, more = "LowLevelZeroPlugin", "HeteroZeroPlugin", "global_batch_size=16, "
    for before, after in (
        (f"from colossalai.booster.plugin import {theirs}", f"from colossal_hetero import {ours}"),
        (f"plugin = {theirs}(", f"plugin = {ours}({more}"),
    ):
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text + REPORT


def run_scripts(texts: list[str]) -> list[str]:
    printed = []
    for text in texts:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), patch.object(colossalai, "launch_from_torch", lambda **_: None):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        dist.barrier()
        printed.append(output.getvalue())
    return printed


def test_scripts_for_colossalai_are_converted_by_three_lines() -> None:
    first, second = run_ranks(2, run_scripts, list(map(converted, SCRIPTS.values())), timeout_seconds=200)
    for name, printed, other in zip(SCRIPTS, first, second, strict=True):
        shown = "A global batch of 16, by rank" if name == "ZeRO" else "An iteration, by rank"
        assert shown in printed, f"{name}: {printed}"
        assert shown not in other, f"{name}: {other}"
