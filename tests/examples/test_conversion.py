"""Scripts for Colossal-AI become scripts for this package by at most three changed lines, and then show a report."""

import contextlib
import io
from unittest.mock import patch

import colossalai
import torch.distributed as dist

from tests.support.harness import run_ranks

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


def run(texts: list[str]) -> list[str]:
    printed = []
    for text in texts:
        output = io.StringIO()
        with contextlib.redirect_stdout(output), patch.object(colossalai, "launch_from_torch", lambda **_: None):
            exec(compile(text, "train.py", "exec"), {"__name__": "__main__"})
        dist.barrier()
        printed.append(output.getvalue())
    return printed


def test_scripts_for_colossalai_are_converted_by_three_lines() -> None:
    first, second = run_ranks(2, run, list(map(converted, SCRIPTS.values())), timeout_seconds=200)
    for name, printed, other in zip(SCRIPTS, first, second, strict=True):
        shown = "A global batch of 16, by rank" if name == "ZeRO" else "An iteration, by rank"
        assert shown in printed, f"{name}: {printed}"
        assert shown not in other, f"{name}: {other}"
