"""Imports what every run imports, so that processes forked from this one start in milliseconds."""

import gc
import importlib

from megatron_moe.kernels.registry import BACKENDS, discover_backends

for module in (
    *("arguments.read", "megatron_moe.build", "megatron_moe.warmup.kernel_warmup", "torch.utils.tensorboard"),
    "torch.fx.experimental.symbolic_shapes",  # imported by the first torch.autograd.grad, with sympy
):
    importlib.import_module(module)
for backend in discover_backends(BACKENDS):
    if not backend.on_request and not backend.missing():
        backend.load()
gc.freeze()  # a collection in a forked process would copy the pages of all imported modules
