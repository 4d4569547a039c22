"""Launches of compiled Triton kernels without Triton's own launch, on a stand-in for a GPU."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.harness import bench_host
from megatron_moe.kernels.backends.triton.launcher import shorten_launches


def add_one(x_ptr, out_ptr, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < size) + 1, mask=at < size)


class Launches:
    """Records the arguments of every launch, and the specialisations that were compiled."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []
        self.compiled: list[str] = []

    def compile(self, jit: Any, key: str, signature: Any, device: int, *others: Any) -> Any:
        kernel = bench_host._compiled(jit, key, signature, device, *others)
        of_stand_in = kernel.run.launch

        def launch(*args: Any) -> None:
            self.arguments.append((key, *args))
            of_stand_in(*args)

        kernel.run.launch = launch
        self.compiled.append(key)
        return kernel


@pytest.fixture
def launches() -> Iterator[Launches]:
    found = Launches()
    with (
        patch.object(JITFunction, "_do_compile", lambda jit, *args: found.compile(jit, *args)),
        patch.object(JITFunction, "run", JITFunction.run),
        patch.object(driver, "_active", bench_host._StandInDriver()),
    ):
        shorten_launches()
        yield found


def kernel_of(module: str) -> Any:
    kernel: Any = JITFunction(add_one)
    kernel.__module__ = module
    return kernel


def test_later_launches_pass_the_arguments_of_the_first(launches: Launches) -> None:
    kernel, x, out = kernel_of("megatron_moe.kernels"), torch.zeros(64), torch.zeros(64)
    by_triton = JITFunction.run
    for _ in range(3):
        kernel[(4, 2)](x, out, 64, BLOCK=16, num_warps=2)
    first, second, third = launches.arguments
    hooks = slice(11, 14)  # launch metadata, and the hooks called before and after a launch
    assert second[:11] == first[:11] and second[14:] == first[14:] == (x, out, 64, 16)
    assert second[hooks] == third[hooks] == (None, None, None), "hooks without functions are not called"
    assert second[1:5] == (4, 2, 1, 0) and second == third
    assert len(launches.compiled) == 1
    shorten_launches()
    assert JITFunction.run is by_triton, "the launch is replaced once"


def test_every_specialisation_has_its_own_kernel(launches: Launches) -> None:
    kernel, x = kernel_of("megatron_moe.kernels"), torch.zeros(65)
    cases: list[tuple[tuple[Any, ...], dict[str, int]]] = [
        ((x, x, 64), {"BLOCK": 16}),
        ((x, x, 63), {"BLOCK": 16}),  # not divisible by 16
        ((x, x, 1), {"BLOCK": 16}),
        ((x, x, 1 << 40), {"BLOCK": 16}),  # 64 bits
        ((x[1:], x, 64), {"BLOCK": 16}),  # not aligned
        ((x.half(), x, 64), {"BLOCK": 16}),
        ((x, x, 64), {"BLOCK": 32}),
        ((x, x, 64), {"BLOCK": 16, "num_warps": 8}),
    ]
    for _ in range(2):
        for args, options in cases:
            kernel[(1,)](*args, **options)
    keys = [each[0] for each in launches.arguments]
    assert len(set(keys)) == len(launches.compiled) == len(cases)
    assert keys[: len(cases)] == keys[len(cases) :]


def test_hooks_see_every_launch(launches: Launches) -> None:
    kernel, x = kernel_of("megatron_moe.kernels"), torch.zeros(64)
    seen: list[Any] = []
    kernel[(1,)](x, x, 64, BLOCK=16)
    knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        for _ in range(2):
            kernel[(1,)](x, x, 64, BLOCK=16)
    finally:
        knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) == 2 and len(launches.arguments) == 3


def test_kernels_of_other_packages_are_launched_by_triton(launches: Launches) -> None:
    kernel, x = kernel_of("another.package"), torch.zeros(64)
    for _ in range(2):
        kernel[(1,)](x, x, 64, BLOCK=16)
    assert "compiled_launches" not in vars(kernel) and len(launches.arguments) == 2
    assert launches.arguments[1][12] is knobs.runtime.launch_enter_hook
