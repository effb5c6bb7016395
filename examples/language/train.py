"""Train a language model with tensor parallelism on devices that are not equally fast.

    python examples/language/train.py --balance auto --straggler 1:4

starts two ranks on this machine, makes the second four times slower, and balances the work between them. The model is
a GPT-2 with fresh weights, the text comes with Python; nothing is downloaded. ``--help`` lists the flags.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the repository, which holds the package "examples"

from examples.common.launch import run_command
from examples.language.options import LanguageOptions, check_options, parse_options

if __name__ == "__main__":
    # Starts the ranks; each of them imports this file and calls main().
    sys.exit(run_command("examples.language.train", parse_options, check_options))

# What follows runs on every rank; it is what a training script of your own needs.

import functools
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DistributedSampler

import colossal_hetero.accelerator  # noqa: F401  (before colossalai: lets it work on a CPU, and quietly)

# isort: split
import colossalai
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin import HybridParallelPlugin
from transformers import GPT2Config, GPT2LMHeadModel

from colossal_hetero import CheckpointConfig, HeteroHybridParallelPlugin
from colossal_hetero.testing.stragglers import inject_stragglers
from examples.common.balancing_report import BalancingReport
from examples.common.learning_rate import warm_up_and_decay
from examples.language.text import BYTES, TextPieces, load_text


def main(options: LanguageOptions) -> None:
    """Join the other ranks, train, and leave them."""
    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    train(options)
    dist.barrier()
    dist.destroy_process_group()


def build_model(options: LanguageOptions) -> GPT2LMHeadModel:
    """A GPT-2 with fresh weights that depend on the seed alone."""
    torch.manual_seed(options.seed)
    config = GPT2Config(
        vocab_size=BYTES,
        n_positions=options.context,
        n_embd=options.hidden,
        n_layer=options.depth,
        n_head=options.heads,
        # The run is too short to need dropout. Balancing does not depend on it.
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        # Colossal-AI 0.5 forgets the causal mask with transformers' default, sdpa.
        attn_implementation="eager",
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


def train(options: LanguageOptions, quiet: bool = False) -> dict[str, Any] | None:
    """Train on all ranks of ``torch.distributed``; returns the summary on rank 0, None elsewhere."""
    layout = check_options(options, dist.get_world_size())
    device = get_accelerator().get_current_device()
    arguments: dict[str, Any] = {"tp_size": layout.tp, "pp_size": 1, "precision": options.precision}
    if options.plugin == "hetero":
        checkpoints = CheckpointConfig(shared=options.save_in) if options.save_in is not None else None
        plugin = HeteroHybridParallelPlugin(balance=options.balance_config(), checkpoints=checkpoints, **arguments)
    else:
        plugin = HybridParallelPlugin(**arguments)

    train_text, test_text = load_text(options.context)
    loader = plugin.prepare_dataloader(
        train_text,
        batch_size=layout.local_batch,
        shuffle=True,
        drop_last=True,
        distributed_sampler_cls=functools.partial(DistributedSampler, seed=options.seed),
    )
    iterations = min(len(loader) * options.epochs, options.steps or sys.maxsize)
    epochs = math.ceil(iterations / len(loader))

    model = build_model(options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model_text = f"GPT-2, {options.hidden} wide, {options.depth} deep, {options.heads} heads"
    data_text = f"pydoc's topics: {len(train_text)} pieces of {options.context} bytes, {len(test_text)} held out"
    report = BalancingReport(
        options, layout, plugin, quiet=quiet, accuracy_of="bytes", baseline="the next byte guessed"
    )
    report.start(f"{model_text}: {parameters / 1e6:.1f} M parameters", data_text, epochs, iterations)

    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, functools.partial(warm_up_and_decay, total=iterations))
    booster = Booster(plugin=plugin)
    model, optimizer, _, loader, schedule = booster.boost(model, optimizer, dataloader=loader, lr_scheduler=schedule)
    first = plugin.resume(model, optimizer, schedule).epoch if options.resume else 0
    stragglers = options.stragglers(layout.world_size)
    if stragglers is not None:  # for the experiment only: makes ranks slow
        inject_stragglers(model, optimizer, stragglers, len(loader))

    with report:
        for epoch in range(first, epochs):
            model.train()
            loader.sampler.set_epoch(epoch)
            losses: list[Tensor] = []
            report.begin_epoch()
            for tokens in itertools.islice(loader, iterations - epoch * len(loader)):
                tokens = tokens.to(device)
                loss = model(**inputs(tokens)).loss
                booster.backward(loss, optimizer)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.detach().float())
                report.iteration(epoch, losses)
            mean_losses = torch.stack(losses)
            dist.all_reduce(mean_losses, group=plugin.dp_group)
            report.epoch(
                epoch, (mean_losses / layout.dp).tolist(), evaluate(model, test_text, 2 * layout.local_batch, plugin)
            )
            if options.save_in is not None and (epoch + 1) % options.save_every == 0:
                step = min((epoch + 1) * len(loader), iterations)
                plugin.save(model, optimizer, schedule, step=step, epoch=epoch + 1)  # the epoch to continue with
        if options.save_in is not None:
            plugin.wait_for_saves()
        if options.checkpoint is not None:
            booster.save_model(model, str(options.checkpoint / "model.pt"))
    return report.finish()


def inputs(tokens: Tensor) -> dict[str, Tensor]:
    """Arguments of the model, which then computes the loss of the next token.

    Colossal-AI needs the mask, although it hides no token, and the labels, also where only logits are wanted.
    """
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


@torch.no_grad()
def evaluate(model: Any, text: TextPieces, batch_size: int, plugin: HybridParallelPlugin) -> float:
    """The share of bytes of ``text`` that the model predicts from those before. Collective over all ranks."""
    model.eval()
    correct = 0
    for tokens in text.tokens.split(batch_size):
        tokens = tokens.to(get_accelerator().get_current_device())
        # [B, T, 256 / tp]: each rank has the logits of its part of the vocabulary.
        logits = model(**inputs(tokens)).logits.contiguous()
        parts = [torch.empty_like(logits) for _ in range(plugin.tp_size)]
        dist.all_gather(parts, logits, group=plugin.tp_group)
        predicted = torch.cat(parts, dim=-1)[:, :-1, :BYTES].argmax(-1)
        correct += int((predicted == tokens[:, 1:]).sum())
    return correct / text.tokens[:, 1:].numel()
