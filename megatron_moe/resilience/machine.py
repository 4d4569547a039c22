"""Probes of this machine: small computations that test which features a run can use."""

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F


@dataclass(frozen=True)
class Probe:
    """Result of one probe."""

    name: str
    works: bool
    text: str


def probes(device: torch.device) -> list[Probe]:
    """Probes every feature that a run on `device` needs."""
    trials: list[tuple[str, Callable[[torch.device], str]]] = [
        ("python", lambda _: f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} cores"),
        ("device", _device),
        ("bf16", _bf16),
        ("grouped_mm", _grouped_mm),
        ("attention", _attention),
        ("gloo", lambda _: _group("gloo", torch.device("cpu"))),
    ]
    if device.type == "cuda":
        trials.append(("nccl", lambda device: _group("nccl", device)))
    return [_tried(name, trial, device) for name, trial in trials]


def _tried(name: str, trial: Callable[[torch.device], str], device: torch.device) -> Probe:
    try:
        return Probe(name, True, trial(device))
    except (RuntimeError, NotImplementedError, AttributeError, ValueError, OSError) as trouble:
        return Probe(name, False, f"{type(trouble).__name__}: {str(trouble).splitlines()[0] if str(trouble) else ''}")


def _device(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads; no GPU is used"
    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    memory = f"{properties.total_memory / 2**30:.0f} GiB"
    return f"{torch.cuda.device_count()} x {properties.name}, {memory}, {capability}, CUDA {torch.version.cuda}"


def _bf16(device: torch.device) -> str:
    """Multiplies 8 x 8 matrices of ones: every element of the result is 8, which is exact in bf16."""
    ones = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    _expect(ones @ ones, 8.0)
    return "matrix product"


def _grouped_mm(device: torch.device) -> str:
    """Runs a grouped GEMM of two experts with 16 rows each."""
    rows = torch.ones(32, 64, device=device, dtype=torch.bfloat16)
    weights = torch.ones(2, 64, 16, device=device, dtype=torch.bfloat16)
    offsets = torch.tensor([16, 32], device=device, dtype=torch.int32)
    _expect(F.grouped_mm(rows, weights, offs=offsets), 64.0)
    return "torch.nn.functional.grouped_mm, offsets on the device"


def _attention(device: torch.device) -> str:
    heads = torch.ones(1, 2, 16, 64, device=device, dtype=torch.bfloat16)
    _expect(F.scaled_dot_product_attention(heads, heads, heads, is_causal=True), 1.0)
    return "scaled_dot_product_attention, causal"


def _group(backend: str, device: torch.device) -> str:
    """All-reduces in a temporary process group of one rank."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        one = torch.ones(1, device=device)
        dist.all_reduce(one)
        _expect(one, 1.0)
    finally:
        dist.destroy_process_group()
    return "all-reduce in a group of one"


def _expect(actual: torch.Tensor, value: float) -> None:
    if not bool((actual == value).all()):
        raise ValueError(f"computes {actual.flatten()[0].item()} instead of {value}")
