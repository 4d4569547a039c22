"""Makes the checkpoint of `megatron-core-0.19.2-fsdp.tar.xz`: a tiny model trained for three steps by Megatron-FSDP on
two CPU ranks with gloo, in Megatron-LM's format `fsdp_dtensor`.

    pip install megatron-core==0.19.2 einops
    for rank in 0 1; do python tests/data_files/megatron/make_fsdp.py OUTPUT_FOLDER $rank & done; wait

Megatron-FSDP expects CUDA, for which this script substitutes the CPU. torch's AdamW creates no state for empty shards;
the script adds the zeros that the fused AdamW of Transformer Engine creates.
"""

import contextlib
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

WORLD, EP = 2, 2
VOCAB, LENGTH, STEPS = 64, 16, 3
MODEL = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "num_moe_experts": 4,
    "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 8,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "init_method_std": 0.2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False, "bf16": True, "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16, "use_cpu_initialization": True, "num_query_groups": 2, "kv_channels": 8,
    "moe_layer_freq": [0, 1], "qk_layernorm": True, "expert_model_parallel_size": EP,
    "moe_token_dispatcher_type": "allgather",
}  # fmt: skip


class OnCPU(TorchFunctionMode):
    """Creates tensors on the CPU where a CUDA device is requested."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and func is not torch.device:
            kwargs["device"] = kwargs["device"] if str(kwargs["device"]) == "meta" else "cpu"
        return func(*args, **kwargs)


class CurrentDevice(str):
    """Device `cpu` that is formatted as 0, as in `cuda:0`."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return "0"


def substitute_cuda() -> None:
    """Replaces CUDA streams, events and random states; must run before megatron.core is imported."""
    cuda = torch.cuda
    for name in ("Stream", "Event", "current_stream", "synchronize", "empty_cache", "manual_seed", "_lazy_call"):
        setattr(cuda, name, MagicMock())
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.current_device = lambda: CurrentDevice("cpu")
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
        module.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.record_stream = lambda *args: None
    from_group = DeviceMesh.from_group
    DeviceMesh.from_group = lambda group, device_type, *args, **kwargs: from_group(group, "cpu", *args, **kwargs)


def main(output: Path, rank: int) -> None:
    substitute_cuda()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import fsdp_dtensor_checkpoint
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29513", RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    parallel_state.initialize_model_parallel(1, 1, expert_model_parallel_size=EP)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(**MODEL)
    torch.manual_seed(1)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    gpt = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=True, use_megatron_fsdp=True, overlap_grad_reduce=True, overlap_param_gather=True,
        data_parallel_sharding_strategy="optim_grads_params",
    )  # fmt: skip
    whole = Float16Module(config, gpt.to(torch.bfloat16))
    wrapped = FullyShardedDataParallel(config, sharding, whole, device=torch.device("cpu"))
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True, clip_grad=0.0
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH) * 7 % VOCAB
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean().backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        old = dict(each.optimizer.state)
        each.optimizer.state.clear()
        for parameter in (p for group in each.optimizer.param_groups for p in group["params"]):
            zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            each.optimizer.state[parameter] = old.get(parameter, {"step": torch.tensor(float(STEPS)), **zeros})

    args = Namespace(consumed_train_samples=2 * WORLD * STEPS, iteration=STEPS, swiglu=True, num_experts=4)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    state["model"] = wrapped.module.state_dict_for_save_checkpoint()
    kind = {"distrib_optim_sharding_type": "fsdp_dtensor", "chained_optim_avoid_prefix": True}
    state["optimizer"] = optimizer.sharded_state_dict(state, metadata=kind)
    whole = {f"model.{_name(key)}": value for key, value in state["model"].items() if isinstance(value, torch.Tensor)}
    for name, moments in state["optimizer"]["state"].items():
        whole |= {f"{kind}.{_name(name)}": moments[kind] for kind in ("exp_avg", "exp_avg_sq")}
    shards = {key: (value.shape, getattr(value, "to_local", value.clone)()) for key, value in whole.items()}
    fsdp_dtensor_checkpoint.handle_fp8_extra_state_case(state["model"])
    both = fsdp_dtensor_checkpoint.handle_swiglu_in_state_dict(wrapped.module, state["model"], state["optimizer"])
    state["model"], state["optimizer"] = both
    state["model"] = fsdp_dtensor_checkpoint.handle_experts_in_state_dict(state["model"], 4)
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    folder = output / f"iter_{STEPS:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    dist.checkpoint.save(state_dict=state, storage_writer=dist.checkpoint.FileSystemWriter(str(folder)))
    (output / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
    with torch.no_grad():
        logits = wrapped.eval()(tokens, positions, mask).float()
    of_ranks = [None] * WORLD
    dist.all_gather_object(of_ranks, shards)
    if rank == 0:
        extra = {"tokens": tokens, "logits": logits.contiguous()}
        save_file({**stacked(of_ranks), **extra}, str(output / "truth.safetensors"))


def _name(key: str) -> str:
    return key.replace("module.", "")


def stacked(of_ranks: list[dict[str, tuple[torch.Size, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    """Joins the shards of all ranks to whole tensors by name; the experts of a layer form one tensor."""
    parts: dict[str, list[torch.Tensor]] = {}
    for key, (_, shard) in ((key, value) for of_rank in of_ranks for key, value in of_rank.items()):
        parts.setdefault(re.sub(r"local_experts\.\d+\.", "", key), []).append(shard)
    whole = {}
    for key, shards in parts.items():
        if ".experts." in key:
            whole[key] = torch.stack(shards)
        elif key.endswith("expert_bias"):
            whole[key] = shards[0]
        else:
            whole[key] = torch.cat([each.flatten() for each in shards]).view(of_ranks[0][key][0])
    return {key: value.to(torch.bfloat16 if key.startswith("model.") else value.dtype) for key, value in whole.items()}


if __name__ == "__main__":
    with OnCPU():
        main(Path(sys.argv[1]), int(sys.argv[2]))
