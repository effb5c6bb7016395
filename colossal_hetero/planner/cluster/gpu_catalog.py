"""Kinds of GPU that a cluster file can name without describing them, and their channels inside a node.

FLOP/s are those of a dense matrix product in half precision with single-precision sums, from the datasheet.
"""

import re

from .topology import Channel, DeviceKind

NVLINK, PCIE, FABRIC = "NVLink", "PCIe", "Infinity-Fabric"

_KINDS = (
    # What drivers call it, name, GB (10⁹ bytes), TFLOP/s, link in a node, GB/s one way (datasheets of NVLink add both
    # ways; PCIe: 16 lanes)
    # NVIDIA A100 datasheet (2021): 312 TFLOPS, third-generation NVLink 600 GB/s, SXM.
    (r"A100\b", "A100-40", 40, 312, NVLINK, 300),
    (r"A100\b", "A100-80", 80, 312, NVLINK, 300),
    # NVIDIA A800 datasheet (2022): an A100 80 GB with NVLink at 400 GB/s.
    (r"A800\b", "A800", 80, 312, NVLINK, 200),
    # NVIDIA H100 datasheet (2023), SXM: 1,979 TFLOPS with sparsity, half of it dense; H800 has NVLink at 400 GB/s.
    (r"H800\b", "H800", 80, 989.5, NVLINK, 200),
    # NVIDIA's data for H20 as published in 2023: 148 TFLOPS dense, 96 GB HBM3, NVLink 900 GB/s.
    (r"H20\b", "H20", 96, 148, NVLINK, 450),
    # NVIDIA V100 datasheet (2020), SXM2: 125 TFLOPS, NVLink 300 GB/s.
    (r"V100\b", "V100-16", 16, 125, NVLINK, 150),
    (r"V100\b", "V100-32", 32, 125, NVLINK, 150),
    # NVIDIA T4 datasheet (2019): 65 TFLOPS, 16 GB, PCIe 3; error correction, on by default, takes a sixteenth.
    (r"T4\b", "T4", 15, 65, PCIE, 15.75),
    # NVIDIA Ampere GA102 whitepaper, appendix A: 71 TFLOPS dense with FP32 accumulation (142 with FP16), PCIe 4.
    (r"RTX 3090$", "RTX-3090", 24, 71, PCIE, 31.5),
    # NVIDIA GeForce GTX 1080 whitepaper (2016): 8,873 GFLOPS in fp32, 1/64 in fp16, so training is in fp32; PCIe 3.
    (r"GTX 1080$", "GTX-1080", 8, 8.873, PCIE, 15.75),
    # NVIDIA Ampere GA102 whitepaper, appendix C: RTX A6000, 154.8 TFLOPS dense, PCIe 4.
    (r"RTX A6000$", "A6000", 48, 154.8, PCIE, 31.5),
    # NVIDIA Quadro RTX 5000 datasheet (2019): 89.2 TFLOPS, 16 GB, PCIe 3.
    (r"Quadro RTX 5000$", "RTX-5000", 16, 89.2, PCIE, 15.75),
    # NVIDIA GH200 datasheet (2023): 96 GB HBM3, 990 TFLOPS dense. Of four, each pair is joined by 6 of the 18 NVLinks.
    (r"GH200\b", "GH-96", 96, 990, NVLINK, 150),
    # NVIDIA Turing whitepaper (2018), appendix A: RTX 2080 Ti, 56.9 TFLOPS dense with FP32 accumulation, 11 GB, PCIe 3.
    (r"RTX 2080 Ti$", "RTX-2080", 11, 56.9, PCIE, 15.75),
    # NVIDIA Titan RTX (2018): 130 TFLOPS; the Turing whitepaper gives 130.5 for its full TU102 with FP32 accumulation.
    (r"TITAN RTX$", "Titan-RTX", 24, 130.5, PCIE, 15.75),
    # NVIDIA H100 datasheet (2023): SXM 1,979 and PCIe 1,513 TFLOPS with sparsity, half of it dense; NVLink 900 GB/s.
    (r"H100 80GB HBM3$", "H100", 80, 989.5, NVLINK, 450),
    (r"H100 PCIe$", "H100-PCIe", 80, 756.5, PCIE, 63),
    # NVIDIA H200 datasheet (2024), SXM: an H100 with 141 GB HBM3e.
    (r"H200\b", "H200", 141, 989.5, NVLINK, 450),
    # NVIDIA HGX B200 datasheet (2024): 36 PFLOPS with sparsity for eight, half of it dense; NVLink 1.8 TB/s, 180 GB.
    (r"B200\b", "B200", 180, 2250, NVLINK, 900),
    # NVIDIA A10, A30, A40 datasheets (2021): 125, 165 and 149.7 TFLOPS dense, PCIe 4.
    (r"A10$", "A10", 24, 125, PCIE, 31.5),
    (r"A30$", "A30", 24, 165, PCIE, 31.5),
    (r"A40$", "A40", 48, 149.7, PCIE, 31.5),
    # NVIDIA L4 and L40S datasheets (2023): 242 and 733 TFLOPS with sparsity, half of it dense, PCIe 4.
    (r"L4$", "L4", 24, 121, PCIE, 31.5),
    (r"L40S$", "L40S", 48, 366.5, PCIE, 31.5),
    # NVIDIA Ampere GA102 whitepaper, appendix A: RTX 3080, 59.5 TFLOPS dense with FP32 accumulation, 10 GB, PCIe 4.
    (r"RTX 3080$", "RTX-3080", 10, 59.5, PCIE, 31.5),
    # NVIDIA Ada whitepaper (2022), appendix A: 97.5 and 165.2 TFLOPS dense with FP32 accumulation, PCIe 4.
    (r"RTX 4080$", "RTX-4080", 16, 97.5, PCIE, 31.5),
    (r"RTX 4090$", "RTX-4090", 24, 165.2, PCIE, 31.5),
    # NVIDIA Blackwell whitepaper (2025), appendix A: RTX 5090, 209.5 TFLOPS dense with FP32 accumulation, PCIe 5.
    (r"RTX 5090$", "RTX-5090", 32, 209.5, PCIE, 63),
    # AMD Instinct MI250X datasheet (2021): 383 TFLOPS and 128 GB in two dies, which are devices; MI300X datasheet
    # (2023): 1,307.4 TFLOPS dense, 192 GB. Links of 50 and of 64 GB/s one way join each pair.
    (r"MI250X\b", "MI250X-die", 64, 191.5, FABRIC, 50),
    (r"MI300X\b", "MI300X", 192, 1307.4, FABRIC, 64),
)


def usual_memory_reserve(memory_bytes: int) -> int:
    """Bytes of memory that training needs beside the model, for context, buffers, workspaces and the allocator.

    Iterations of 12 plans on GH200 needed 3.5 to 4.7 GB (``benchmarks/planner/measured_plans.py``); Sailor counts 2 to
    3 GB. A small device has less.
    """
    return round(min(2e9 + 0.025 * memory_bytes, 0.15 * memory_bytes))


GPUS: dict[str, DeviceKind] = {
    name: DeviceKind(name, round(memory * 1e9), teraflops * 1e12, usual_memory_reserve(round(memory * 1e9)))
    for _, name, memory, teraflops, *_ in _KINDS
}

INSIDE: dict[str, Channel] = {name: Channel(link, rate * 1e9) for _, name, _, _, link, rate in _KINDS}
"""The channel between devices of a kind in a usual node: SXM if the kind has it, else PCIe."""


def kind_name(device: str, memory_bytes: int) -> str:
    """The preset's name for a device with this name and memory; if there is none, a short form of its name."""
    for pattern, name, gigabytes, *_ in _KINDS:
        # Drivers report a few percent more or less than the name says.
        if re.search(rf"\b{pattern}", device) and abs(memory_bytes / (gigabytes * 1e9) - 1) < 0.15:
            return name
    short = re.sub(r"\b(NVIDIA|Tesla|GeForce|Quadro|AMD)\b", " ", device)
    return "-".join(short.split()) or "device"
