"""Figures of cards for workstations against those that NVIDIA has published (sources: `cost_model/hardware.py`)."""

import pytest

from megatron_moe.cost_model.hardware import GPUS

PUBLISHED = {
    "rtx3090": (24, 936, 71.0, None, 4, (8, 6)),
    "rtx4090": (24, 1008, 165.2, 330.3, 4, (8, 9)),
    "rtx5090": (32, 1792, 209.5, 419.0, 5, (12, 0)),
    "a6000": (48, 768, 154.8, None, 4, (8, 6)),
    "l40s": (48, 864, 362.05, 733.0, 4, (8, 9)),
}
"""GB, GB/s, dense TFLOP/s in bf16 and FP8 with sums in fp32, version of PCIe (16 lanes), compute capability."""
PCIE = {4: 32e9, 5: 64e9}
"""Version of PCIe -> bytes per second of 16 lanes in one direction."""


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_card_has_its_published_figures(kind: str) -> None:
    gpu, (memory, bandwidth, bf16, fp8, pcie, capability) = GPUS[kind], PUBLISHED[kind]
    assert 0.92 * memory < gpu.memory_gib < memory, "drivers keep a part"
    assert gpu.hbm == bandwidth * 1e9 and gpu.capability == capability
    assert gpu.bf16 / 1e12 == pytest.approx(bf16, rel=1e-3)
    assert gpu.bf16 * gpu.fp8_speedup / 1e12 == pytest.approx(fp8 or bf16, rel=0.02)
    assert 0.8 * PCIE[pcie] < gpu.host_link == gpu.nvlink < PCIE[pcie], "PCIe is not reached in full"


def test_every_card_without_nvlink_is_checked() -> None:
    assert {kind for kind, gpu in GPUS.items() if gpu.nvlink < 100e9} == set(PUBLISHED)
