"""Makes the checkpoints of this folder: tiny models trained for three steps by Megatron-Core on one NVIDIA GPU.

    pip install megatron-core==0.19.2 transformer-engine[pytorch] psutil
    python tests/data_files/megatron/make.py OUTPUT_FOLDER

There are three models: "gqa", whose layers differ; "alike", whose layers Megatron stacks; and "mla", with multi-token
prediction and Transformer Engine. Each is saved as a torch_dist checkpoint with its optimizer, and as an older
checkpoint with one file per rank; `truth.safetensors` holds the weights by Megatron's names, tokens, and their logits.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors.torch import save_file

VOCAB, LENGTH, STEPS = 64, 16, 3
COMMON = {
    "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24, "num_moe_experts": 4,
    "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "moe_shared_expert_intermediate_size": 8,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": "none", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": 1e-6, "init_method_std": 0.2,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False, "bf16": True, "params_dtype": torch.bfloat16,
    "pipeline_dtype": torch.bfloat16,
}  # fmt: skip
GROUPED = {"num_query_groups": 2, "kv_channels": 8}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 8, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "rope_type": "rope", "mtp_num_layers": 1, "qk_layernorm": True,
}  # fmt: skip
MODELS = {
    "gqa": lambda: TransformerConfig(**COMMON, **GROUPED, moe_layer_freq=[0, 1], qk_layernorm=True),
    "alike": lambda: TransformerConfig(**COMMON, **GROUPED),
    "mla": lambda: MLATransformerConfig(**COMMON, **LATENT, moe_layer_freq=[0, 1]),
}
RESHARDABLE = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "chained_optim_avoid_prefix": True,
}


def main(output: Path) -> None:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="29511", RANK="0", WORLD_SIZE="1")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1)
    model_parallel_cuda_manual_seed(1)
    for name, config in MODELS.items():
        make(output, name, config())


def make(output: Path, name: str, config: TransformerConfig) -> None:
    torch.manual_seed(1)
    engine = name == "mla"
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=engine)
    more = {"mtp_block_spec": get_gpt_mtp_block_spec(config, spec, use_transformer_engine=engine)} if engine else {}
    model = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope",
        share_embeddings_and_output_weights=False, **more,
    )  # fmt: skip
    model = model.to(torch.bfloat16).cuda()
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True
    )
    optimizer = get_megatron_optimizer(settings, [wrapped])
    tokens = torch.arange(2 * LENGTH, device="cuda").view(2, LENGTH) * 7 % VOCAB
    positions = torch.arange(LENGTH, device="cuda").expand(2, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device="cuda").triu(1)
    for _ in range(STEPS):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(tokens, positions, mask, labels=tokens.roll(-1, 1)).float().mean().backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    args = Namespace(consumed_train_samples=2 * STEPS, iteration=STEPS, swiglu=True)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}

    folder = output / name / f"iter_{STEPS:07d}"
    folder.mkdir(parents=True)
    sharded = model.sharded_state_dict()
    state = optimizer.sharded_state_dict(sharded, metadata=RESHARDABLE)
    dist_checkpointing.save({"model": sharded, "optimizer": state, **common}, str(folder))
    rank = output / f"{name}-per-rank" / folder.name / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": model.state_dict_for_save_checkpoint(), **common}, rank / "model_optim_rng.pt")
    for place in (folder, rank.parent):
        (place.parent / "latest_checkpointed_iteration.txt").write_text(str(STEPS))

    weights = {f"model.{key}": v.detach().cpu() for key, v in model.state_dict().items() if torch.is_tensor(v)}
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask).float().cpu()
    save_file(
        {**{key: v.contiguous() for key, v in weights.items()}, "tokens": tokens.cpu(), "logits": logits},
        str(output / name / "truth.safetensors"),
    )
    print(name, "done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
