"""tools/doctor.py: missing packages, failing probes and exit codes."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from arguments.flags import Registry
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.kernels.registry import BACKENDS, Backend, discover_backends
from megatron_moe.resilience.packages import PACKAGES, InstalledPackage, Package, find_all
from tools import doctor
from tools.doctor import Probe, probes

REGISTRY = Registry.declared()
USER = Backend("transformer_engine", ("transformer_engine",), (), on_request=True, recipes=(), by_name=(), module="x")


def package(name: str) -> Package:
    return next(each for each in PACKAGES if each.name == name)


@pytest.fixture(autouse=True)
def no_probes(monkeypatch):
    """Replaces the probes of the machine, which other tests cover."""
    monkeypatch.setattr(doctor, "probes", lambda device: [Probe("bf16", True, "matrix product")])


def test_complete_machine_can_start_a_run(capsys):
    assert doctor.main(["--device", "cpu"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.endswith("a run can start on this machine\n") and "bf16                  works   matrix product" in out


def test_missing_package_is_reported_with_flags_and_installation():
    missing = InstalledPackage(package=package("transformer-engine"), version=None, tested=None)
    lines = doctor.package_lines([missing], [USER], REGISTRY)
    assert lines[1:] == [
        "      without it: --kernel-backend transformer_engine",
        '      install: pip install --no-build-isolation ".[te]"',
    ]
    assert "no flag needs it" in doctor.package_lines([missing], [], REGISTRY)[1]


def test_unavailable_flags_are_marked():
    deep_ep = package("deep-ep")
    assert doctor.flags_of(deep_ep, [], REGISTRY) == ["--moe-flex-dispatcher-backend deepep"]
    backend = Backend("deepep", ("deep_ep",), (), on_request=True, recipes=(), by_name=(), module="x")
    assert doctor.flags_of(deep_ep, [backend], REGISTRY)[0] == "--kernel-backend deepep"
    assert doctor.flags_of(package("tiktoken"), [], REGISTRY) == ["--tokenizer-type TikTokenizer"]
    assert "--tokenizer-type GPT2BPETokenizer" in doctor.flags_of(package("tokenizers"), [], REGISTRY)
    fla = [each for each in discover_backends(BACKENDS) if "fla" in each.needs]
    found = doctor.flags_of(package("fla-core"), fla, REGISTRY)
    assert found == ["--kernel-backend fla"], "the project has kernels of its own for linear attention"


@pytest.mark.parametrize("wrong", [{"version": None}, {"problem": "another program"}])
def test_missing_or_wrong_requirement_is_an_environment_problem(wrong, capsys, monkeypatch):
    found = [replace(each, **wrong) if each.package.name == "numpy" else each for each in find_all()]
    monkeypatch.setattr(doctor, "find_all", lambda constraints: found)
    assert doctor.main(["--device", "cpu"]) == ExitCode.ENVIRONMENT
    assert capsys.readouterr().out.endswith("broken or missing: numpy\n")


def test_failing_probe_is_an_environment_problem(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "probes", lambda device: [Probe("nccl", False, "RuntimeError: no GPU")])
    assert doctor.main(["--device", "cpu"]) == ExitCode.ENVIRONMENT
    assert "nccl                  FAILS   RuntimeError: no GPU" in capsys.readouterr().out


def test_wrong_package_is_reported_with_build_steps():
    wrong = InstalledPackage(package=package("apex"), version="0.9", tested=None, problem="another program")
    lines = doctor.build_lines([wrong])
    assert any("APEX_CUDA_EXT=1" in line for line in lines) and any("pip uninstall apex" in line for line in lines)
    assert doctor.build_lines([replace(wrong, problem="")]) == []


def test_missing_constraints_file_is_rejected(capsys):
    with pytest.raises(SystemExit):
        doctor.main(["--constraints", "nowhere.txt"])
    assert "--constraints nowhere.txt is not a file" in capsys.readouterr().err


def test_all_probes_pass_and_leave_no_process_group():
    tried = {probe.name: probe for probe in probes(torch.device("cpu"))}
    assert [name for name, probe in tried.items() if not probe.works] == []
    assert {"python", "device", "bf16", "grouped_mm", "attention", "gloo"} == set(tried)
    assert not dist.is_initialized()


def test_wrong_gemm_fails_its_probe(monkeypatch):
    monkeypatch.setattr(doctor.F, "grouped_mm", lambda rows, weights, offs: torch.zeros(32, 16))
    failed = {probe.name: probe.text for probe in probes(torch.device("cpu")) if not probe.works}
    assert failed == {"grouped_mm": "ValueError: computes 0.0 instead of 64.0"}


def test_failing_probe_does_not_stop_the_others(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such backend\nwith a long story")

    monkeypatch.setattr(doctor.dist, "init_process_group", broken)
    failed = {probe.name: probe.text for probe in probes(torch.device("cpu")) if not probe.works}
    assert failed == {"gloo": "RuntimeError: no such backend"}
