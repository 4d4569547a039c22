"""Memory lines."""

import re

import torch

from megatron_moe.logs.memory import memory_line, memory_tags

CPU = torch.device("cpu")


def test_the_line_names_rank_iteration_and_megabytes():
    line = memory_line(3, 10, CPU)
    assert re.fullmatch(
        r"\[Rank 3\] \(after 10 iterations\) memory \(MB\) \| resident: \d+\.\d\d \| max resident: \d+\.\d\d", line
    )


def test_resident_memory_grows_with_what_is_held():
    def resident() -> float:
        return float(memory_line(0, 0, CPU).split("resident: ")[1].split(" ")[0])

    before = resident()
    held = torch.ones(16 * 2**20)
    assert 60 < resident() - before < 80, held.shape


def test_a_cpu_has_no_allocator_to_report():
    assert memory_tags(CPU) == {}


def test_what_all_processes_occupy_is_told_on_request():
    used = float(memory_line(0, 0, CPU, whole_device=True).split("used on the device: ")[1])
    resident = float(memory_line(0, 0, CPU).split("resident: ")[1].split(" ")[0])
    assert used > resident
