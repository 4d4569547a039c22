"""Memory, compute rates and link rates of GPUs in their usual servers, from data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_moe.config.precision import FloatName
from megatron_moe.cost_model.flops import peak_flops

GpuKind = Literal[
    "a100", "h100", "h200", "gh200", "b200", "b300", "gb200", "gb300", "vr200",
    "rtx3090", "rtx4090", "rtx5090", "a6000", "l40s",
]  # fmt: skip

GIB = 1 << 30
LINK_EFFICIENCY = 0.7
"""Fraction of a link's peak rate that large collectives reach. Measured on the NVLink of H200, with rows of 4 KB: 0.54
with NCCL, 0.76 with this project's kernels."""


@dataclass(frozen=True)
class GPU:
    """A GPU model in its usual server. Link rates are per GPU and direction."""

    kind: GpuKind
    name: str
    memory_gib: float
    """Memory that torch can allocate."""
    hbm: float
    """Bandwidth of the device memory (HBM or GDDR), in bytes per second."""
    nvlink: float
    """Bandwidth to GPUs of the same NVLink domain, in bytes per second."""
    network: float
    """Bandwidth to GPUs outside the NVLink domain, in bytes per second."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    per_node: int = 8
    """Number of GPUs per host."""
    nvlink_domain: int = 8
    """Number of GPUs per NVLink domain, which is a host or a rack."""
    host_link: float = 55e9
    """Bandwidth to host memory, in bytes per second; the default is that of PCIe 5 x16."""
    fp8_speedup: float = 2.0
    """Dense FP8 rate divided by the dense bf16 rate; 1 if the GPU does not support FP8."""
    bf16_tflops: float | None = None
    """Peak dense bf16 TFLOP/s that replaces the data sheet's (`--gpu-tflops`), by which all other compute rates are
    scaled too; None means the data sheet's."""
    is_custom: bool = False
    """Whether flags replaced figures of the GPU type."""

    @property
    def label(self) -> str:
        """Name in reports."""
        return "custom GPU" if self.is_custom else self.name

    @property
    def summary(self) -> str:
        """Formats memory and rates as a phrase for reports."""
        return (
            f"{self.memory_gib:g} GiB, {self.bf16 / 1e12:,.0f} TFLOP/s in bf16, "
            f"memory with {self.hbm / 1e9:,.0f} GB/s, links with {self.nvlink / 1e9:,.0f} GB/s"
        )

    @property
    def bf16(self) -> float:
        """Peak dense bf16 FLOP/s."""
        return self._of_data_sheet if self.bf16_tflops is None else self.bf16_tflops * 1e12

    @property
    def _of_data_sheet(self) -> float:
        peak = peak_flops(self.name, "bf16")
        assert peak is not None, f"the bf16 rate of {self.name} is not known"
        return peak

    def peak_flops_for(self, dtype: FloatName) -> tuple[float, FloatName]:
        """Returns (peak dense FLOP/s, `dtype`), or (bf16 rate, "bf16") if no rate is known for `dtype`."""
        peak = peak_flops(self.name, dtype)
        return (self.bf16, "bf16") if peak is None else (peak * self.bf16 / self._of_data_sheet, dtype)

    @property
    def fp8(self) -> float:
        """Peak dense FP8 FLOP/s; the bf16 rate if the GPU does not support FP8."""
        return self.fp8_speedup * self.bf16

    def domain_ranks(self, world_size: int) -> int:
        """Maximum number of ranks per NVLink domain. A job larger than a rack of 72 GPUs uses only 64 GPUs per rack
        (`sbatch --segment=16`), because parallel sizes are powers of two."""
        if self.nvlink_domain <= self.per_node or world_size <= self.nvlink_domain:
            return self.nvlink_domain
        return 1 << (self.nvlink_domain.bit_length() - 1)


_LINK_3, _LINK_4, _LINK_5, _LINK_6 = 300e9, 450e9, 900e9, 1800e9
"""NVLink rates of Ampere, Hopper, Blackwell and Rubin GPUs, in bytes per second and direction."""
_PORT_200, _PORT_400, _PORT_800, _PORT_1600 = 25e9, 50e9, 100e9, 200e9
"""Network rates of one port of ConnectX-6, -7 and -8, and of two ports of ConnectX-9, in bytes per second."""
_PCIE_4, _PCIE_5 = 27e9, 55e9
"""Rates of 16 lanes of PCIe between GPUs of a host and to host memory, in bytes per second and direction."""
_ETHERNET = 12.5e9 / 8
"""Network rate per GPU, in bytes per second, where eight GPUs share a port of 100 Gbit/s."""
_GRACE = 225e9
"""Host link rate per GPU, in bytes per second, where two GPUs share the 450 GB/s of one Grace CPU."""

_KINDS = (
    GPU(
        "a100", "A100", memory_gib=79.1, hbm=2.039e12, nvlink=_LINK_3, network=_PORT_200, capability=(8, 0),
        host_link=_PCIE_4, fp8_speedup=1.0,
    ),
    GPU("h100", "H100", memory_gib=79.2, hbm=3.35e12, nvlink=_LINK_4, network=_PORT_400, capability=(9, 0)),
    GPU("h200", "H200", memory_gib=139.8, hbm=4.8e12, nvlink=_LINK_4, network=_PORT_400, capability=(9, 0)),
    GPU(
        "gh200", "GH200", memory_gib=94.9, hbm=4.0e12, nvlink=_LINK_4, network=_PORT_200, per_node=4, nvlink_domain=4,
        capability=(9, 0), host_link=450e9,
    ),
    GPU("b200", "B200", memory_gib=178.4, hbm=8e12, nvlink=_LINK_5, network=_PORT_400, capability=(10, 0)),
    GPU("b300", "B300", memory_gib=268.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_800, capability=(10, 3)),
    GPU(
        "gb200", "GB200", memory_gib=184.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_400, per_node=4, nvlink_domain=72,
        capability=(10, 0), host_link=_GRACE,
    ),
    GPU(
        "gb300", "GB300", memory_gib=277.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_800, per_node=4, nvlink_domain=72,
        capability=(10, 3), host_link=_GRACE,
    ),
    GPU(
        "vr200", "VR200", memory_gib=277.0, hbm=22e12, nvlink=_LINK_6, network=_PORT_1600, per_node=4, nvlink_domain=72,
        capability=(10, 7), host_link=450e9, fp8_speedup=17.5 / 4,
    ),
    GPU(
        "rtx3090", "RTX 3090", memory_gib=23.7, hbm=0.936e12, nvlink=_PCIE_4, network=_ETHERNET, capability=(8, 6),
        host_link=_PCIE_4, fp8_speedup=1.0,
    ),
    GPU(
        "rtx4090", "RTX 4090", memory_gib=23.6, hbm=1.008e12, nvlink=_PCIE_4, network=_ETHERNET, capability=(8, 9),
        host_link=_PCIE_4,
    ),
    GPU(
        "rtx5090", "RTX 5090", memory_gib=31.4, hbm=1.792e12, nvlink=_PCIE_5, network=_ETHERNET, capability=(12, 0),
        host_link=_PCIE_5,
    ),
    GPU(
        "a6000", "RTX A6000", memory_gib=47.5, hbm=0.768e12, nvlink=_PCIE_4, network=_ETHERNET, capability=(8, 6),
        host_link=_PCIE_4, fp8_speedup=1.0,
    ),
    GPU(
        "l40s", "L40S", memory_gib=44.4, hbm=0.864e12, nvlink=_PCIE_4, network=_ETHERNET, capability=(8, 9),
        host_link=_PCIE_4,
    ),
)  # fmt: skip
"""Rates from NVIDIA's data sheets of HGX A100, H100, H200, B200 and B300, nodes of four GH200, and GB200, GB300 and
VR200 NVL72 (preliminary). NVLink rates are half of the published bidirectional rates of 600 (A100), 900 (Hopper), 1800
(Blackwell) and 3600 GB/s (Rubin). `memory_gib` is the memory that drivers report; the published values, in the
same order, are 80, 80, 141, 180, 270, 96, 186, 279 and 288 GB. VR200 is assumed to report as much as GB300.

Memory, bandwidth and rates of GEMMs that accumulate in fp32 (`flops.py`) of the cards for workstations, from NVIDIA:
- RTX 3090, RTX A6000: NVIDIA Ampere GA102 GPU Architecture V2.1, appendices A and C,
  https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.1.pdf
- RTX 4090: NVIDIA Ada GPU Architecture, appendix A,
  https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf
- RTX 5090: NVIDIA RTX Blackwell GPU Architecture, appendix A,
  https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/nvidia-rtx-blackwell-gpu-architecture.pdf
- L40S: data sheet, https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413 They have 24, 48, 24, 32 and 48 GB, of
which torch reports `memory_gib` in published out-of-memory messages. Their documents state 16 lanes of PCIe 4 (RTX
5090: 5), 64 and 128 GB/s in both directions; `nvlink` is an estimate of the rate at which GPUs of a host exchange data
over these lanes. Bridges, which join two RTX 3090 or RTX A6000 at 56 GB/s each way, are not counted. Eight cards to a
host and their network are assumptions."""

GPUS: Mapping[str, GPU] = MappingProxyType({gpu.kind: gpu for gpu in _KINDS})
