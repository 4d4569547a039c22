"""Removes repeated work from Triton's interpreter, in which tests without a GPU run kernels.

The interpreter searches `triton.language` for functions to replace at every launch and at every call of a device
function. For every operation, it builds a table of dtypes and objects for shapes. For sums of integers, it computes
whether they overflow, and uses the result only if kernels are debugged. This took most of the time of small kernels.
"""

import inspect
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_BOTH = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
"""Stands for a kernel that uses both modules: then no device function needs other replacements than its kernel."""
_replace_functions, _dtype_of = interpreter._patch_lang, cache(interpreter._get_np_dtype)
_make_type, _make_tensor = tl.block_type.__init__, tl.tensor.__init__


def make_interpreter_fast() -> None:
    """Replaces functions of the interpreter in this process by others with the same results."""
    interpreter._patch_lang = lambda kernel: _replace_functions(_BOTH)
    interpreter._patch_builtin = _replace_builtins
    interpreter._get_np_dtype = _numpy_dtype
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    tl.block_type.__init__ = _init_type
    tl.tensor.__init__ = _init_tensor


@cache
def _builtins(package: Any) -> list[tuple[str, Any]]:
    """Functions of a module or class of the language that the interpreter replaces."""
    return [(name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]


def _replace_builtins(package: Any, builder: Any, scope: Any) -> None:
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


def _call_device_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return function.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _numpy_dtype(dtype: tl.dtype) -> np.dtype:
    element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _dtype_of(element)


@cache
def _sizes(shape: tuple[int, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes of a type and of its tensors that depend on the shape only."""
    made, tensor = (cls.__new__(cls) for cls in (tl.block_type, tl.tensor))
    _make_type(made, tl.int32, list(shape))
    _make_tensor(tensor, None, made)
    return tuple({name: vars(each)[name] for name in ("shape", "numel")} for each in (made, tensor))


def _init_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    of_type, self.of_tensors = _sizes(tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape]))
    self.element_ty = element_ty
    self.__dict__.update(of_type)
    self.name = f"<{self.shape}, {element_ty}>"


def _init_tensor(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
    if isinstance(type, tl.block_type):
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.__dict__.update(type.of_tensors)
    else:
        _make_tensor(self, handle, type)
