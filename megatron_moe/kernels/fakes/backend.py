"""Fake kernels for memory emulation: a backend's Python wrappers run, but launch no kernels.

A second copy of each backend module is imported. In the copy, a fake module replaces Triton, which need not be
installed, and the fakes in `_REPLACED` replace functions that call libraries. A fake allocates and saves for backward
the same tensors as the real op on an H100 or H200, but computes nothing. Tensors are on torch's `meta` device, which
the backends treat as a GPU.
"""

import builtins
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_moe.config.attention import CoreAttentionConfig
from megatron_moe.parallel.autograd_function import AutogradFunction

_BACKENDS = "megatron_moe.kernels.backends"
_CUDNN_WIDEST_HEAD = 256


def fake_backend(name: str) -> ModuleType:
    """Returns a copy of the module of backend "triton" or "torch_native" whose ops launch no kernels."""
    return _loader().load(f"{_BACKENDS}.{name}.backend")


class _Triton:
    """Fake Triton module. Attributes, indexing and calls all return this object, so kernel launches do nothing."""

    def __getattr__(self, name: str) -> "_Triton":
        return self

    def __getitem__(self, grid: object) -> "_Triton":
        return self

    def __call__(self, *args: object, **options: object) -> "_Triton":
        return self

    def __bool__(self) -> bool:
        return False

    @staticmethod
    def cdiv(number: int, divisor: int) -> int:
        return -(-number // divisor)


class _BackendLoader:
    """Imports copies of backend modules. Imports inside a copy return other copies, or a fake module for Triton."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._triton = _Triton()

    def load(self, name: str) -> ModuleType:
        if name not in self._modules:
            spec = importlib.util.find_spec(name)
            assert spec is not None and spec.loader is not None, f"no module {name}"
            module = self._modules[name] = importlib.util.module_from_spec(spec)
            vars(module)["__builtins__"] = {**vars(builtins), "__import__": self._import}
            spec.loader.exec_module(module)
            vars(module).update(_REPLACED.get(name, {}))
        return self._modules[name]

    def _import(self, name: str, *scope: Any, **named: Any) -> Any:
        """Replaces the built-in `__import__` inside the copies of backend modules that this loader creates."""
        if name.partition(".")[0] == "triton":
            return self._triton
        if not name.startswith((f"{_BACKENDS}.triton", f"{_BACKENDS}.torch_native")):
            return builtins.__import__(name, *scope, **named)
        module = self.load(name)
        for attribute in scope[2]:  # names after `from package import` that the package does not define: submodules
            if not hasattr(module, attribute):
                setattr(module, attribute, self.load(f"{name}.{attribute}"))
        return module


_loader = cache(_BackendLoader)


# torch's matmuls with an `out_dtype` have no kernel for meta tensors


def _gemm_into(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Fake of a matrix multiplication that writes its result to `out`. It allocates nothing."""


def _wide_gemm(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


def _grouped_mm(a: Tensor, b: Tensor, offsets_e: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[2]) if b.dim() == 3 else (len(offsets_e), a.shape[0], b.shape[1]))


# cuDNN: sizes of results and workspace as measured on a GPU, see tests/memory_emulation/test_kernels.py


def _cudnn_supports(q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, *, causal: bool) -> bool:
    width = q_SBND.shape[-1]
    return q_SBND.dtype.itemsize == 2 and width % 8 == 0 and max(width, v_SBGE.shape[-1]) <= _CUDNN_WIDEST_HEAD


def _attend(q_BNSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, *options: object, **scale: float) -> Sequence[Tensor]:
    """Fake attention forward: returns output, log-sum-exp [B, N, S, 1], dropout seed and dropout offset."""
    batch, heads, seq, _ = q_BNSD.shape
    out_SBNE = q_BNSD.new_empty(seq, batch, heads, v_BGSE.shape[-1])
    lse_BNS1 = q_BNSD.new_empty(batch, heads, seq, 1, dtype=torch.float32)
    seed, offset = (q_BNSD.new_empty((), dtype=torch.int64) for _ in range(2))
    return out_SBNE.permute(1, 2, 0, 3), lse_BNS1, seed, offset


def _differentiate(
    grad_BNSE: Tensor, q_BNSD: Tensor, k_BGSD: Tensor, v_BGSE: Tensor, *options: object, **scale: float
) -> Sequence[Tensor]:
    """Fake attention backward: returns the gradients of q, k and v. Also allocates, temporarily, the workspace of
    cuDNN: the gradient of q in fp32 and, with grouped queries, the gradients of k and v for every query head."""
    batch, heads, seq, _ = q_BNSD.shape
    grads = [x.new_empty([x.shape[i] for i in (2, 0, 1, 3)]).permute(1, 2, 0, 3) for x in (q_BNSD, k_BGSD, v_BGSE)]
    wide_q = q_BNSD.new_empty(q_BNSD.shape, dtype=torch.float32)
    per_head = [x.new_empty(batch, heads, *x.shape[2:]) for x in (k_BGSD, v_BGSE) if x.shape[1] < heads]
    del wide_q, per_head
    return grads


def _dot_product_attention(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None, config: CoreAttentionConfig
) -> Tensor:
    return _FakeAttention.apply(q_SBND, k_SBGD, v_SBGE, mask)


class _FakeAttention(AutogradFunction):
    @staticmethod
    def forward(ctx: Any, q_SBND: Tensor, k_SBGD: Tensor, v_SBGE: Tensor, mask: Tensor | None) -> Tensor:
        out_BNSE, *others = _attend(*(x.permute(1, 2, 0, 3) for x in (q_SBND, k_SBGD, v_SBGE)))
        out_SBNE = out_BNSE.permute(2, 0, 1, 3)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGE, mask, out_SBNE, *others)
        return out_SBNE

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs = (x.permute(1, 2, 0, 3) for x in (grads[0], *ctx.saved_tensors[:3]))
        return *(grad.permute(2, 0, 1, 3) for grad in _differentiate(*inputs)), None


_REPLACED: Mapping[str, Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {
        f"{_BACKENDS}.torch_native.backend": {
            "_gemm_into": _gemm_into,
            "_wide_gemm": _wide_gemm,
            "_grouped_mm": _grouped_mm,
            "_dot_product_attention": _dot_product_attention,
        },
        f"{_BACKENDS}.torch_native.cudnn": {
            "cudnn_supports": _cudnn_supports,
            "_attend": _attend,
            "_differentiate": _differentiate,
        },
    }
)
"""Fake functions by module name and function name. They replace the real functions in copies of these modules."""
