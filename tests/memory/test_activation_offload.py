"""Activation offload: results are bitwise identical, each tensor is copied once and in time, and memory is freed."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.memory import ActivationOffloadConfig, MemoryConfig, RecomputeConfig
from megatron_moe.config.model import ModelConfig, MTPConfig
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.kernels.registry import select_kernels
from megatron_moe.memory.activation_offload import ActivationOffload, select_groups
from megatron_moe.memory.saved_tensors import SavedTensorPolicy
from megatron_moe.model.gpt import GPT, LossOutput
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.parallel.streams import Event, HostCopies
from tests.helpers import tiny
from tests.helpers.pipelines import laid_out, train, train_on_ranks
from tests.helpers.tiny_models import HIDDEN, layer_config, microbatch, mla_config, moe_config
from tests.helpers.tolerances import EXACT
from tests.memory.alive import Alive

MODULES = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
BATCH, SEQ, NUMBER = 2, 9, 4
HIDDEN_STATE = BATCH * SEQ * HIDDEN * NUMBER


def offload(*modules: str, **changes) -> ActivationOffloadConfig:
    return ActivationOffloadConfig(offload_modules=modules, **{"min_offloaded_tensor_size": 1, **changes})


class RecordingHostCopies(HostCopies):
    """Host copies on a CPU, with a record of every call."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def to_host(self, into: Tensor, source: Tensor, *after: Event, free_source: bool = False) -> Event:
        self.events.append(("out", id(into)))
        return super().to_host(into, source, *after, free_source=free_source)

    def to_device(self, into: Tensor, source: Tensor, *after: Event) -> Event:
        self.events.append(("back", id(source)))
        return super().to_device(into, source, *after)

    def wait(self, event: Event) -> None:
        self.events.append(("wait", 0))


class Net:
    """Model of MoE layers in fp32 on torch kernels, with a record of its offload copies."""

    def __init__(
        self, config: ActivationOffloadConfig, recompute: RecomputeConfig | None = None, num_layers: int = 3
    ) -> None:
        context = ParallelContext.single(dtype=torch.float32)
        kernels = select_kernels(KernelConfig(kernel_backend="torch_native"), context.device, context.dtype)
        self.copies = RecordingHostCopies()
        self.offload = ActivationOffload(config, self.copies)
        self.pool = self.offload.pool
        layers = tuple(layer_config(mla_config(v_head_dim=9), moe_config()) for _ in range(num_layers))
        saved_tensors = SavedTensorPolicy(recompute, offload=self.offload if config.offload_modules else None)
        self.model = GPT(tiny.model(layers=layers), context, kernels, saved_tensors=saved_tensors)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, number: int = 0) -> Tensor:
        self.offload.begin_forward((number, 0))
        output = self.model(microbatch(BATCH, SEQ, seed=number))
        assert isinstance(output, LossOutput)
        return output.loss_BS.sum()

    def gradients(self) -> dict[str, Tensor]:
        found = {name: parameter.grad for name, parameter in self.model.named_parameters()}
        self.model.zero_grad()
        return found


@pytest.mark.parametrize("modules", [*((module,) for module in MODULES), MODULES])
def test_gradients_are_identical_to_the_bit_and_all_memory_is_freed(modules):
    plain, moved = Net(offload()), Net(offload(*modules))
    for number in range(2):
        plain.forward(number).backward()
        moved.offload.begin_pass([("forward", (number, 0)), ("backward", (number, 0))])
        with Alive() as alive:
            loss = moved.forward(number)
            loss.backward()
            del loss
        gradients = moved.gradients()
        EXACT.check_all(gradients, plain.gradients(), f"{modules}, microbatch {number}")
        buffers = sum(buffer.nbytes for each in moved.pool._free.values() for buffer, _ in each)
        left = alive.bytes() - sum(gradient.nbytes for gradient in gradients.values())
        assert left <= buffers + 4096, f"{left} bytes are left, host buffers have {buffers}"
    assert moved.pool.bytes_to_host == moved.pool.bytes_to_device > 0


def test_every_byte_of_a_module_is_copied_once():
    net = Net(offload("attn_norm"))
    net.forward().backward()
    assert net.pool.bytes_to_host >= 3 * HIDDEN_STATE, "the inputs of three norms"
    alone, shared = Net(offload("core_attn")), Net(offload("core_attn", "attn_proj"))
    for each in (alone, shared):
        each.forward().backward()
    assert alone.pool.bytes_to_host == shared.pool.bytes_to_host, (
        "the output of attention is the input of the last matrix"
    )


def test_host_buffers_are_reused_by_later_steps():
    net = Net(offload(*MODULES))
    net.forward(0).backward()
    first = net.pool.num_buffers
    for number in range(1, 4):
        net.forward(number).backward()
    assert first > 3 and net.pool.num_buffers == first


def test_the_last_layer_stays_if_its_backward_follows_immediately():
    net = Net(offload("core_attn"))
    net.forward(0).backward()
    whole, events = net.pool.bytes_to_host, len(net.copies.events)
    net.offload.begin_pass([("forward", (1, 0)), ("backward", (1, 0))])
    net.forward(1).backward()
    assert net.pool.bytes_to_host - whole == whole * 2 // 3
    kinds = [kind for kind, _ in net.copies.events[events:]]
    assert kinds.count("out") == kinds.count("back") > 0
    net.offload.begin_pass([("forward", (2, 0)), ("forward", (3, 0)), ("backward", (2, 0)), ("backward", (3, 0))])
    sent = net.pool.bytes_to_host
    first, second = net.forward(2), net.forward(3)
    assert net.pool.bytes_to_host - sent == whole * 2, "another backward follows, so both are offloaded completely"
    first.backward()
    second.backward()


def test_a_group_is_reloaded_during_the_backward_of_the_next_one():
    """The backward of each layer launches the reload of the layer before it.

    Of three layers, the last one is not offloaded.
    """
    net = Net(offload("attn_proj", "core_attn"))
    net.forward(0).backward()
    net.offload.begin_pass([("forward", (1, 0)), ("backward", (1, 0))])
    net.copies.events.clear()
    loss = net.forward(1)
    sent = [which for kind, which in net.copies.events if kind == "out"]
    net.copies.events.clear()
    loss.backward()
    back = [which for kind, which in net.copies.events if kind == "back"]
    assert sorted(back) == sorted(sent)
    half = len(sent) // 2
    assert set(back[:half]) == set(sent[half:]), "the later layer first"
    waits = [place for place, (kind, _) in enumerate(net.copies.events) if kind == "wait"]
    last_back = max(place for place, (kind, _) in enumerate(net.copies.events) if kind == "back")
    assert waits[0] > half - 1 and last_back < waits[-1]
    late = [place for place in waits if place < last_back]
    assert len(late) <= len(waits) - half, (
        "the reload of the first layer starts before the end of the second one's backward"
    )


def test_the_number_of_unfinished_copies_is_limited():
    """Unfinished copies keep device memory allocated, because it is freed only after the compute stream has waited."""
    net = Net(offload(*MODULES, fine_grained_offloading_max_inflight_offloads=1))
    net.offload.begin_pass([("forward", (0, 0)), ("forward", (1, 0)), ("backward", (0, 0)), ("backward", (1, 0))])
    losses = [net.forward(number) for number in range(2)]
    kept = [copy for in_flight in net.offload._in_flight.values() for copy in in_flight]
    assert all(len(in_flight) <= 1 for in_flight in net.offload._in_flight.values())
    assert kept and all(copy.tensor is not None and copy.at == (1, 0) for copy in kept)
    losses[0].backward()
    assert any(net.offload._in_flight.values()), "only copies of the microbatch in backward are waited for"
    losses[1].backward()
    assert not any(net.offload._in_flight.values())


def test_copies_of_unused_tensors_are_waited_for_at_the_end_of_a_step():
    """A tensor whose reload has been launched is freed with the graph, because backward never runs."""
    net = Net(offload("core_attn"))
    loss = net.forward(0)
    group = net.offload._microbatches[0, 0].groups[0]
    group.reload()
    reloaded = len(group.live_tensors())
    assert reloaded and not net.offload.unused
    del loss
    assert len(net.offload.unused) == reloaded
    net.copies.events.clear()
    net.offload.finish_pass()
    assert net.copies.events == [("wait", 0)] * reloaded and not net.offload.unused


def test_groups_are_selected_by_fraction_bytes_and_last_use():
    groups = [("a", 10), ("b", 4)] * 3
    assert select_groups(groups, fraction=1.0, stay_bytes=0, keep_last=False) == {0, 1, 2, 3, 4, 5}
    assert select_groups(groups, fraction=1.0, stay_bytes=0, keep_last=True) == {0, 1, 2, 3}
    assert select_groups(groups, fraction=0.5, stay_bytes=0, keep_last=True) == {0, 1, 2}
    assert select_groups(groups, fraction=0.0, stay_bytes=0, keep_last=True) == frozenset()
    assert select_groups(groups, fraction=1.0, stay_bytes=5, keep_last=False) == {0, 1, 2, 3}
    assert select_groups(groups, fraction=1.0, stay_bytes=1000, keep_last=False) == frozenset()


def test_small_tensors_and_parameters_stay_on_the_device():
    net = Net(offload(*MODULES, min_offloaded_tensor_size=1 << 20))
    net.forward().backward()
    assert net.pool.bytes_to_host == 0


def test_inputs_of_discarded_outputs_are_offloaded_too():
    """The norm's output is recomputed from a reloaded input."""
    chosen = RecomputeConfig(recompute_modules=("layernorm", "moe_act", "mla_up_proj", "core_attn"))
    plain, both = Net(offload()), Net(offload("attn_norm", "mlp_norm", "moe_act", "qkv_linear", "core_attn"), chosen)
    for number in range(2):
        plain.forward(number).backward()
        both.forward(number).backward()
        EXACT.check_all(both.gradients(), plain.gradients(), f"microbatch {number}")
    assert both.pool.bytes_to_host > 0


def plan(config: ActivationOffloadConfig, recompute: RecomputeConfig | None = None) -> RunPlan:
    model: ModelConfig = tiny.model(num_layers=4, mtp=MTPConfig(num_layers=1, loss_scaling_factor=0.3))
    return tiny.plan(model=model, memory=MemoryConfig(offload=config, recompute=recompute or RecomputeConfig()))


def test_steps_over_a_pipeline_with_virtual_stages_are_the_same_bits():
    config = offload(
        *MODULES,
        activation_offload_fraction=0.8,
        delta_offload_bytes_across_pp_ranks=5000,
        fine_grained_offloading_max_inflight_offloads=2,
    )
    chosen = RecomputeConfig(recompute_modules=("layernorm", "moe_act"))
    plain, moved = (laid_out(each, "Et|t|t|tmL", 2) for each in (plan(offload()), plan(config, chosen)))
    EXACT.check_all(train_on_ranks(moved, steps=1), train_on_ranks(plain, steps=1), "two ranks, two stages each")


def test_overlapped_pairs_are_the_same_bits():
    alone = ParallelContext.single()
    plain, moved = (
        replace(each, pipeline=replace(each.pipeline, overlap=True))
        for each in (plan(offload()), plan(offload(*MODULES)))
    )
    EXACT.check_all(train(moved, alone, steps=1), train(plain, alone, steps=1), "overlapped")
