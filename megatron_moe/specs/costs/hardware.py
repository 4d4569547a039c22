"""Capabilities of GPUs and their machines, from data sheets."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from megatron_moe.specs.count_flops import peak_flops
from megatron_moe.specs.precision import FloatName

GpuKind = Literal["h100", "h200", "b200", "b300", "gb200", "gb300"]

GIB = 1 << 30
LINK_EFFICIENCY = 0.7
"""Share of a link's rate that large collectives reach. Measured on H200, rows of 4 KB: 0.54 (NCCL) to 0.76 (own
kernels) of NVLink."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU in the machine it is usually built into. Rates are per GPU and direction."""

    kind: GpuKind
    name: str
    memory_gib: float
    """What torch finds to allocate."""
    hbm: float
    """Bytes per second."""
    nvlink: float
    """Bytes per second to GPUs of the same NVLink domain."""
    network: float
    """Bytes per second to all others."""
    per_node: int
    """GPUs, and so ranks, of one host."""
    nvlink_domain: int
    """GPUs that NVLink joins: those of a host, or of a rack."""

    @property
    def bf16(self) -> float:
        """Dense FLOP/s."""
        peak = peak_flops(self.name, "bf16")
        assert peak is not None, f"no bf16 rate of {self.name}"
        return peak

    def rate(self, dtype: FloatName) -> tuple[float, FloatName]:
        """(dense FLOP/s, format) of products in a format; of bf16 where the kind has no published rate for it."""
        peak = peak_flops(self.name, dtype)
        return (self.bf16, "bf16") if peak is None else (peak, dtype)

    @property
    def fp8(self) -> float:
        """Dense FLOP/s: twice those of bf16 on all of these kinds."""
        return 2 * self.bf16

    def domain_ranks(self, world_size: int) -> int:
        """Ranks that share an NVLink domain. Of the 72 GPUs of a rack larger jobs take 64: their groups are powers of
        two (`sbatch --segment=16`)."""
        if self.nvlink_domain <= self.per_node or world_size <= self.nvlink_domain:
            return self.nvlink_domain
        return 1 << (self.nvlink_domain.bit_length() - 1)


_LINK_4, _LINK_5 = 450e9, 900e9
"""NVLink of Hopper and of Blackwell."""
_PORT_400, _PORT_800 = 50e9, 100e9
"""ConnectX-7 and ConnectX-8."""

_KINDS = (
    Gpu("h100", "H100", memory_gib=79.2, hbm=3.35e12, nvlink=_LINK_4, network=_PORT_400, per_node=8, nvlink_domain=8),
    Gpu("h200", "H200", memory_gib=139.8, hbm=4.8e12, nvlink=_LINK_4, network=_PORT_400, per_node=8, nvlink_domain=8),
    Gpu("b200", "B200", memory_gib=178.4, hbm=8e12, nvlink=_LINK_5, network=_PORT_400, per_node=8, nvlink_domain=8),
    Gpu("b300", "B300", memory_gib=268.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_800, per_node=8, nvlink_domain=8),
    Gpu("gb200", "GB200", memory_gib=184.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_400, per_node=4, nvlink_domain=72),
    Gpu("gb300", "GB300", memory_gib=277.0, hbm=8e12, nvlink=_LINK_5, network=_PORT_800, per_node=4, nvlink_domain=72),
)
"""NVIDIA's data sheets of HGX H100, H200, B200 and B300, GB200 NVL72 and GB300 NVL72: 80, 141, 180, 270, 186 and 279 GB
of HBM; NVLink 900 and 1800 GB/s in both directions together; a port of 400 or 800 Gb/s per GPU. The memory is what
drivers report of it, in GiB."""

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.kind: gpu for gpu in _KINDS})
