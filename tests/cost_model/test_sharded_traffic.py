"""Predicted traffic of sharded gradients, and of replicas of shards, against the collectives of training steps."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from megatron_moe.build import build_data, build_model, build_train_loader, build_trainer
from megatron_moe.config.fsdp import FSDPConfig
from megatron_moe.config.run import RunPlan
from megatron_moe.cost_model.hardware import GPUS
from megatron_moe.cost_model.placement import Placements
from megatron_moe.cost_model.traffic import Communication
from megatron_moe.optim import unit_shards, unit_store
from megatron_moe.parallel.context import ParallelContext
from megatron_moe.train.train_state import TrainState
from tests.helpers.pipelines import KERNELS
from tests.helpers.ranks import on_threads
from tests.helpers.tolerances import FP64_REF
from tests.optim.test_fsdp import ZERO_2, ZERO_3, sharded
from tests.parity.cells import plan_of
from tests.parity.dimensions import cell_of

OUTER = replace(ZERO_3, outer_dp_sharding_strategy="optim")
COLLECTIVES = {"start_reduce_scatters_": 1, "start_reduce_scatter_": 1, "start_all_reduce_": 2, "start_all_gather_": 1}
"""Collectives of gradients and replicas -> number of times that they send each byte, except a rank's own part."""


@pytest.mark.parametrize(
    ("dp", "config", "instances"),
    [(2, ZERO_3, 1), (2, ZERO_2, 1), (4, ZERO_3, 2), (4, OUTER, 2)],
    ids=["zero-3", "zero-2", "hsdp", "outer"],
)
def test_gradients_of_units_are_sent_as_predicted(
    dp: int, config: FSDPConfig, instances: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every microbatch reduces the gradients; replicas sum their shards once, or sum and gather the parts that they
    update. Padding of the buffers is sent, too."""
    run = sharded(plan_of(cell_of(f"dp={dp} zero=on overlap=grads balance=none accumulation=2")), config, instances)
    assert run.num_microbatches == 2
    sent: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def counted(name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def launch(grads: Tensor | Sequence[Tensor], group: Any, *args: Any, **options: Any) -> Any:
            tensors = [grads] if isinstance(grads, Tensor) else grads
            share = COLLECTIVES[name] * (group.size - 1) / group.size
            sent[threading.get_ident()][name] += sum(each.nbytes for each in tensors) * share
            return start(grads, group, *args, **options)

        return launch

    for name in COLLECTIVES:
        module = unit_store if name == "start_all_gather_" else unit_shards
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))

    def one_step(context: ParallelContext) -> tuple[float, float]:
        """Bytes of one step, and the size of the buffers relative to that of the parameters."""
        trainer = build_trainer(run, context, build_model(run, context, KERNELS), KERNELS)
        sent.pop(threading.get_ident(), None)
        trainer.step(build_train_loader(run, context, build_data(run, context)).next_step(), TrainState())
        layouts = [buffer.layout for buffer in trainer.buffers.buffers]
        num_elements = sum(param.end - param.start for layout in layouts for param in layout.params)
        return sent[threading.get_ident()].total(), sum(layout.size for layout in layouts) / num_elements

    def predicted_bytes(run: RunPlan, what: str) -> float:
        traffic = Communication(run, Placements(GPUS["h100"]).placements_of_groups(run.parallel)).of_rank(0)
        return sum(each.bytes for each in traffic if each.what.startswith(what))

    predicted = predicted_bytes(run, "gradients") + predicted_bytes(run, "weights")
    predicted -= predicted_bytes(
        sharded(run, replace(config, outer_dp_sharding_strategy="no_shard"), instances), "weights"
    )
    for found, padded in on_threads(run.parallel, one_step):
        FP64_REF.check(found, predicted * padded, "bytes")
