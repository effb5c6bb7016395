"""Scripts for Colossal-AI become scripts for this package by at most three changed lines, and then show a report."""

from __future__ import annotations

import contextlib
import io
import textwrap
from dataclasses import dataclass
from unittest.mock import patch

import colossalai
import pytest
import torch.distributed as dist

from tests.support.harness import run_ranks

TENSOR_PARALLEL = (
    (
        "from colossalai.booster.plugin import HybridParallelPlugin",
        "from colossal_hetero import HeteroHybridParallelPlugin",
    ),
    ("plugin = HybridParallelPlugin(", "plugin = HeteroHybridParallelPlugin("),
)
REPORT = "plugin.report().print()"


@dataclass(frozen=True)
class Script:
    text: str
    changes: tuple[tuple[str, str], ...]
    """Beginnings of lines, and what takes their place."""
    shown: str
    """In the report."""

    def converted(self) -> str:
        text = textwrap.dedent(self.text).strip() + "\n"
        for before, after in self.changes:
            assert text.count(before) == 1, before
            text = text.replace(before, after)
        return text + REPORT + "\n"


BEGIN = """
    import colossalai
    import torch
    from colossalai.booster import Booster
"""

SCRIPTS = {
    "BERT": Script(
        BEGIN
        + """
    from colossalai.booster.plugin import HybridParallelPlugin
    from transformers import BertConfig, BertForSequenceClassification

    colossalai.launch_from_torch(verbose=False)
    sizes = dict(vocab_size=128, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    model = BertForSequenceClassification(BertConfig(**sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(9):
        tokens = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(tokens, labels=tokens[:, 0] % 2).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    """,
        TENSOR_PARALLEL,
        "An iteration, by rank",
    ),
    "GPT-2": Script(
        BEGIN
        + """
    from colossalai.booster.plugin import HybridParallelPlugin
    from transformers import GPT2Config, GPT2LMHeadModel

    colossalai.launch_from_torch(verbose=False)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="bf16", max_norm=1.0)
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(9):
        tokens = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(step))
        loss = model(tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    """,
        TENSOR_PARALLEL,
        "An iteration, by rank",
    ),
    "timm ViT": Script(
        BEGIN
        + """
    import timm
    from colossalai.booster.plugin import HybridParallelPlugin

    colossalai.launch_from_torch(verbose=False)
    sizes = dict(img_size=32, patch_size=16, embed_dim=32, depth=1, num_heads=4, num_classes=3)
    model = timm.models.VisionTransformer(**sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    criterion = torch.nn.CrossEntropyLoss()
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, precision="fp32")
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    for step in range(9):
        images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        loss = criterion(model(images), torch.arange(4) % 3)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    """,
        TENSOR_PARALLEL,
        "An iteration, by rank",
    ),
    "ZeRO": Script(
        BEGIN
        + """
    from colossalai.booster.plugin import LowLevelZeroPlugin

    colossalai.launch_from_torch(verbose=False)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
    plugin = LowLevelZeroPlugin(stage=1, precision="bf16")
    loader = plugin.prepare_dataloader(data, batch_size=8, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = torch.nn.CrossEntropyLoss()
    booster = Booster(plugin=plugin)
    model, optimizer, criterion, loader, _ = booster.boost(model, optimizer, criterion, loader)
    for inputs, labels in loader:
        loss = criterion(model(inputs.bfloat16()).float(), labels)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    """,
        (
            (
                "from colossalai.booster.plugin import LowLevelZeroPlugin",
                "from colossal_hetero import HeteroZeroPlugin",
            ),
            ("plugin = LowLevelZeroPlugin(stage=1,", "plugin = HeteroZeroPlugin(stage=1, global_batch_size=16,"),
        ),
        "A global batch of 16, by rank",
    ),
    "pipeline": Script(
        BEGIN
        + """
    from colossalai.booster.plugin import HybridParallelPlugin
    from transformers import LlamaConfig, LlamaForCausalLM

    colossalai.launch_from_torch(verbose=False)
    sizes = dict(vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, use_cache=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32")
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(9):
        tokens = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(step))
        batch = iter([dict(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))])
        booster.execute_pipeline(batch, model, lambda outputs, _: outputs.loss, optimizer, return_loss=True)
        optimizer.step()
        optimizer.zero_grad()
    """,
        TENSOR_PARALLEL,
        "An iteration, by rank",
    ),
}


def run(texts: list[str]) -> list[str]:
    """What the scripts print on this rank."""
    printed = []
    for text in texts:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), patch.object(colossalai, "launch_from_torch", lambda **_: None):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        dist.barrier()
        printed.append(output.getvalue())
    return printed


def test_scripts_for_colossalai_are_converted_by_three_lines() -> None:
    assert all(len([*script.changes, REPORT]) <= 3 for script in SCRIPTS.values())
    first, second = run_ranks(2, run, [script.converted() for script in SCRIPTS.values()], timeout_seconds=200)
    for (name, script), printed, other in zip(SCRIPTS.items(), first, second, strict=True):
        assert script.shown in printed, f"{name}: {printed}"
        assert script.shown not in other, f"{name}: {other}"


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_compile_before_and_after(name: str) -> None:
    script = SCRIPTS[name]
    compile(textwrap.dedent(script.text), name, "exec")
    compile(script.converted(), name, "exec")
