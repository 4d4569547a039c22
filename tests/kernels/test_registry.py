"""Selection of kernel backends: priorities, requests and rejections."""

import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_moe.config.exit_codes import ConfigProblem, EnvironmentProblem, ExitCode
from megatron_moe.config.precision import low_precision_config
from megatron_moe.config.run import KernelConfig
from megatron_moe.kernels import registry as choosing
from megatron_moe.kernels.backend_names import AUTO, BACKENDS, requestable
from megatron_moe.kernels.kernel_set import LOW_PRECISION_OPS, OPS, KernelSet, Priority
from megatron_moe.kernels.reference import backend as reference
from megatron_moe.kernels.registry import discover_backends, select_kernels

INPUTS = low_precision_config("blockwise").inputs
CPU = torch.device("cpu")


def backend_of(bundle: KernelSet) -> dict[str, str]:
    return {choice.op: choice.backend for choice in bundle.choices}


def refusal(config: KernelConfig, dtype: torch.dtype = torch.float32) -> str:
    with pytest.raises(EnvironmentProblem) as caught:
        select_kernels(config, CPU, dtype)
    assert caught.value.code is ExitCode.ENVIRONMENT
    return str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_selects_one_backend_per_op_with_a_reason(device: str, dtype: torch.dtype) -> None:
    for low_precision in (None, replace(low_precision_config("blockwise"), emulate=True)):
        bundle = select_kernels(KernelConfig(), torch.device(device), dtype, low_precision)
        used = [op for op in OPS if low_precision or op not in LOW_PRECISION_OPS]
        assert [choice.op for choice in bundle.choices] == used
        assert all(callable(getattr(bundle, op)) for op in OPS) and all(choice.reason for choice in bundle.choices)
        lines = bundle.table().splitlines()
        assert all(line.startswith(op) for op, line in zip(used, lines, strict=True))


def test_fp8_without_a_device_for_it_is_rejected_unless_emulated(monkeypatch) -> None:
    for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"):
        with pytest.raises(EnvironmentProblem, match=rf"{recipe} needs a GPU .* device cpu; --emulate-low-precision"):
            select_kernels(KernelConfig(), CPU, torch.bfloat16, low_precision_config(recipe))
    least = {"delayed": (8, 9), "tensorwise": (8, 9), "blockwise": (9, 0), "mxfp8": (10, 0), "nvfp4": (10, 0)}
    for found in ((8, 0), (8, 9), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=found: found)
        for recipe, needed in least.items():
            reject = pytest.raises(EnvironmentProblem, match=f"compute capability {found[0]}.{found[1]};")
            with nullcontext() if found >= needed else reject:
                choosing.check_device(recipe, torch.device("cuda"))


def test_backends_provide_low_precision_ops_for_their_recipes_only(tmp_path, monkeypatch) -> None:
    backend = tmp_path / "fast.py"
    backend.write_text(
        "from megatron_moe.kernels.kernel_set import Priority, Support\n"
        'NAME = "fast"\nNEEDS = ()\nRECIPES = ("blockwise e4m3",)\n'
        'def support(op, device, dtype):\n    return Support(Priority.BEST, "fast")\n'
        'def quantized_linear_forward(x, weight, bias):\n    return "fast"\n'
    )
    found = choosing.read_backend(backend)
    assert found.recipes == ("blockwise e4m3",)
    assert found.for_recipe("blockwise e4m3").provides == found.provides
    assert found.for_recipe("blockwise hybrid").provides == ()
    spec = importlib.util.spec_from_file_location("fast", backend)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(choosing, "discover_backends", lambda folder: [found])
    monkeypatch.setattr(choosing.Backend, "load", lambda self: module)
    monkeypatch.setattr(choosing, "check_device", lambda recipe, device: None)
    for hybrid, chosen in ((False, "fast"), (True, "reference")):
        config = low_precision_config("blockwise", hybrid=hybrid)
        bundle = select_kernels(KernelConfig(), torch.device("cuda"), torch.bfloat16, config)
        assert backend_of(bundle)["quantized_linear_forward"] == chosen
        assert backend_of(bundle)["quantized_linear_input_grad"] == "reference"
    bundle = select_kernels(KernelConfig(), torch.device("cuda"), torch.bfloat16, low_precision_config("blockwise"))
    quantized = bundle.quantize_rows(torch.ones(1, 128), INPUTS, rowwise=True, columnwise=False)
    plain = torch.ones(1, 128)
    assert bundle.linear_forward(quantized, plain, None) == "fast", "quantised operands select the quantised op"
    assert bundle.linear_forward(plain, plain, None) == 128.0


def test_kernel_sets_reject_missing_and_unknown_ops() -> None:
    functions = {op: getattr(reference, op) for op in OPS}
    for op in OPS:
        with pytest.raises(AssertionError, match=f"missing ops \\['{op}'\\]"):
            KernelSet.of({name: f for name, f in functions.items() if name != op}, ())
    with pytest.raises(AssertionError, match="unknown ops \\['sort'\\]"):
        KernelSet.of({**functions, "sort": sorted}, ())


def test_backends_implement_and_rate_their_declared_ops() -> None:
    installed = [backend for backend in discover_backends(choosing.BACKENDS) if not backend.missing()]
    assert {"torch_native", "triton"} <= {backend.name for backend in installed}
    for backend in installed:
        module = backend.load()
        for op in backend.provides:
            assert callable(getattr(module, op)), f"{backend.name} has no {op}"
            for device in ("cpu", "cuda"):
                for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                    assert module.support(op, torch.device(device), dtype).reason


def test_a_backend_that_cannot_be_imported_is_not_used(monkeypatch) -> None:
    def fails(name: str) -> None:
        raise ImportError("libtriton.so: failed to map segment from shared object")

    monkeypatch.setattr(choosing, "is_installed", fails)
    chosen = select_kernels(KernelConfig(), CPU, torch.float32)
    assert "triton" not in backend_of(chosen).values() and "its import failed: libtriton.so" in chosen.table()
    with pytest.raises(EnvironmentProblem, match="its import failed: libtriton.so"):
        select_kernels(KernelConfig(kernel_per_op=(("rms_norm", "triton"),)), CPU, torch.float32)


def test_fp64_selects_the_reference_only() -> None:
    assert set(backend_of(select_kernels(KernelConfig(), CPU, torch.float64)).values()) == {"reference"}


def test_bf16_grouped_gemms_on_gpus_keep_offsets_on_the_device() -> None:
    chosen = backend_of(select_kernels(KernelConfig(), torch.device("cuda"), torch.bfloat16))
    taken = {op: name for op, name in chosen.items() if op.startswith("grouped_")}
    assert taken == dict.fromkeys(("grouped_forward", "grouped_input_grad"), "torch_native") | {
        "grouped_weight_grad": "triton"
    }
    chosen = backend_of(select_kernels(KernelConfig(), torch.device("cuda"), torch.float32))
    assert {chosen[op] for op in OPS if op.startswith("grouped_")} == {"reference"}


def test_per_op_requests_override_the_backend_request() -> None:
    config = KernelConfig(
        kernel_backend="reference", kernel_per_op=(("rms_norm", "torch_native"), ("attention", "auto"))
    )
    chosen = backend_of(select_kernels(config, CPU, torch.float32))
    assert {op for op, name in chosen.items() if name == "torch_native"} == {"rms_norm", "attention"}


def test_ops_missing_in_the_requested_backend_use_the_reference_with_a_reason() -> None:
    bundle = select_kernels(KernelConfig(kernel_backend="torch_native"), CPU, torch.float32)
    (rope,) = [choice for choice in bundle.choices if choice.op == "rope"]
    assert rope.backend == "reference" and "torch_native does not provide rope" in rope.reason
    assert backend_of(bundle)["permute"] == "torch_native", "asked for, though auto would not"


def test_unknown_ops_are_rejected_with_the_known_ones() -> None:
    with pytest.raises(ConfigProblem, match="'rms' does not exist; the ops are linear_forward") as caught:
        select_kernels(KernelConfig(kernel_per_op=(("rms", "reference"),)), CPU, torch.float32)
    assert caught.value.code is ExitCode.CONFIG


def test_names_of_backends_are_those_of_their_files() -> None:
    assert requestable() == (AUTO, reference.NAME, *(backend.name for backend in discover_backends(BACKENDS)))


def test_unsupported_requests_are_rejected_with_reason_and_alternatives() -> None:
    assert refusal(KernelConfig(kernel_backend="torch_native"), torch.float64) == (
        "Kernel backend 'torch_native' cannot compute 'linear_weight_grad' in float64 on cpu: "
        "fp64 is used for verification only and runs on plain torch. It can be computed by auto or reference, "
        "for instance with --kernel-per-op linear_weight_grad=auto."
    )
    assert "cannot compute 'rope' in float32 on cpu: it does not provide rope" in refusal(
        KernelConfig(kernel_per_op=(("rope", "torch_native"),))
    )


BACKEND = """
NAME = "shiny"
NEEDS = ("a_package_nobody_has",)
def rope(): ...
def rms_norm(): ...
raise RuntimeError("imported although its package is missing")
"""


def test_backends_with_missing_packages_are_discovered_without_importing_them(tmp_path, monkeypatch) -> None:
    (tmp_path / "shiny.py").write_text(BACKEND)
    (tmp_path / "__init__.py").write_text("")
    monkeypatch.setattr(choosing, "BACKENDS", tmp_path)
    (rope,) = [choice for choice in select_kernels(KernelConfig(), CPU, torch.float32).choices if choice.op == "rope"]
    assert rope.backend == "reference" and "shiny: it requires a_package_nobody_has (not installed)" in rope.reason
    assert "it requires a_package_nobody_has (not installed)" in refusal(KernelConfig(kernel_backend="shiny"))


def test_a_backend_without_constants_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text('NAME = "x"')
    with pytest.raises(AssertionError, match="must define NAME and NEEDS"):
        discover_backends(tmp_path)


def test_backend_of_highest_priority_is_selected_and_called(tmp_path, monkeypatch) -> None:
    package = tmp_path / "shiny_backends"
    package.mkdir()
    (package / "shiny.py").write_text(
        "from megatron_moe.kernels.kernel_set import Priority, Support\n"
        'NAME = "shiny"\nNEEDS = ()\n'
        "def support(op, device, dtype):\n"
        '    return Support(Priority.BEST if op == "sum_of_squares" else Priority.YES, "made up")\n'
        "def sum_of_squares(flat):\n    return 42\n"
        "def rope(*args):\n    return 43\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(choosing, "BACKENDS", package)
    read = choosing.read_backend
    monkeypatch.setattr(
        choosing, "read_backend", lambda path: replace(read(path), module=f"shiny_backends.{path.stem}")
    )
    bundle = select_kernels(KernelConfig(), CPU, torch.float32)
    assert backend_of(bundle)["sum_of_squares"] == "shiny" and bundle.sum_of_squares(torch.ones(1)) == 42
    assert backend_of(bundle)["rope"] == "reference", "it can, but does not say that it should"
    assert choosing.support_of("rope", discover_backends(package)[0], CPU, torch.float32).fit is Priority.YES
    assert select_kernels(KernelConfig(kernel_per_op=(("rope", "shiny"),)), CPU, torch.float32).rope() == 43
