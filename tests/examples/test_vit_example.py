"""The ViT example end to end: what it trains and what it writes."""

from __future__ import annotations

SMALL = "--hidden 32 --depth 2 --heads 4 --patch 8 --batch-size 32"

SUMMARY_KEYS = {
    *("schema", "args", "world_size", "iterations", "warmup_iterations", "iteration_seconds", "samples_per_second"),
    *("loss", "accuracy", "peak_memory_bytes", "ranks", "bound", "what_if"),
}
RANK_KEYS = {"rank", "work_seconds", "matmul_seconds", "wait_seconds"}
RANK_KEYS |= {"resized", "migrated", "resharded", "received"}
