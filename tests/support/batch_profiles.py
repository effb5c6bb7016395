"""Batch profiles of two kinds of devices, made by hand."""

from typing import Any

from colossal_hetero.planner.batches.batch_profile import BatchProfile, DeviceProfile, ModelIdentity
from colossal_hetero.planner.cluster.topology import MeasuredLink

GIB = 2**30


MODEL = ModelIdentity(
    name="net", parameters=GIB, parameter_bytes=2 * GIB, gradient_bytes=2 * GIB, optimizer_bytes=12 * GIB, digest="abc"
)


def device(name: str = "fast", **changes: Any) -> DeviceProfile:
    values: dict[str, Any] = {
        "device": name,
        "memory_bytes": 24 * GIB,
        "state_bytes": 16 * GIB,
        "sample_bytes": 2 * GIB,
        "max_batch": 4,
        "memory_bound": True,
        "points": [{"batch": 1, "seconds": 0.1}, {"batch": 4, "seconds": 0.25}],
        "flops": 1e12,
    }
    return DeviceProfile(**{**values, **changes})


def profile(**changes: Any) -> BatchProfile:
    values: dict[str, Any] = {
        "stage": 0,
        "precision": "fp16",
        "model": MODEL,
        "communication_seconds": 0.5,
        "kinds": [device(), device("slow", max_batch=2, memory_bytes=21 * GIB, protocols=["nccl", "gloo"])],
        "ranks": [0, 1, 0, 1],
        "links": [MeasuredLink(ranks=(0, 1), protocol="gloo", latency_seconds=1e-4, bytes_per_second=1e9)],
    }
    return BatchProfile(**{**values, **changes})
