"""Machine probes."""

import torch
import torch.distributed as dist

from megatron_moe.resilience import machine
from megatron_moe.resilience.machine import probes

CPU = torch.device("cpu")


def test_all_probes_pass_and_leave_no_process_group():
    tried = {probe.name: probe for probe in probes(CPU)}
    assert [name for name, probe in tried.items() if not probe.works] == []
    assert {"python", "device", "bf16", "grouped_mm", "attention", "gloo"} == set(tried)
    assert not dist.is_initialized()


def test_wrong_product_fails_its_probe(monkeypatch):
    monkeypatch.setattr(machine.F, "grouped_mm", lambda rows, weights, offs: torch.zeros(32, 16))
    failed = {probe.name: probe.text for probe in probes(CPU) if not probe.works}
    assert failed == {"grouped_mm": "ValueError: computes 0.0 instead of 64.0"}


def test_failing_probe_does_not_stop_the_others(monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no such backend\nwith a long story")

    monkeypatch.setattr(machine.dist, "init_process_group", broken)
    failed = {probe.name: probe.text for probe in probes(CPU) if not probe.works}
    assert failed == {"gloo": "RuntimeError: no such backend"}
