"""Tiny random models of every supported family, made with transformers from config classes alone (no download).

Weights have unit gain (std 1 / sqrt(fan-in)); norms, biases and router biases are random. With the usual std of 0.02,
the MoE output would be so small that errors in it would be below fp32 rounding.

Options of transformers as an fp32 oracle: attention "eager", which GPT-OSS needs for its sinks; experts "eager", the
plain loop (other implementations give the same logits to 6e-7); `output_router_logits` off, since the loss would
contain the auxiliary loss; no cache, no dropout, `eval()`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

VOCAB = 61

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_experts_per_tok": 3,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MLA: Mapping[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "intermediate_size": 40,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    # Differs from 1e-6, which transformers uses for the latent norms whatever the config says.
    "rms_norm_eps": 1e-4,
}
_INDEXER: Mapping[str, Any] = {"index_topk": 5, "index_n_heads": 12, "index_head_dim": 16}
_MIXTRAL: Mapping[str, Any] = {
    **_COMMON,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "intermediate_size": 24,
}
_QWEN: Mapping[str, Any] = {**_COMMON, "num_experts": 8, "intermediate_size": 40, "moe_intermediate_size": 12}
_OLMOE: Mapping[str, Any] = {**_COMMON, "num_experts": 8, "intermediate_size": 12}
_GLM: Mapping[str, Any] = {**_COMMON, "intermediate_size": 40, "moe_intermediate_size": 12, "n_routed_experts": 8}


def _rope(kind: str, base: float, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": base, **more}


# The base is small so that some of the few dims rotate between beta_slow and beta_fast times in the original context.
_YARN = _rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=0.5)
_LLAMA3 = _rope(
    "llama3", 500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


def configs() -> dict[str, transformers.PretrainedConfig]:
    """Maps test ids to configs, one or more for every family."""
    return {
        **_softmax_routers(),
        **_deepseek(),
        **_gpt_oss_and_glm(),
        **_delta_nets(),
        **_nemotron(),
        **_later_families(),
        **_kimi_linear(),
        **_compressed(),
    }


def _delta_nets() -> dict[str, transformers.PretrainedConfig]:
    """Configs of Qwen3-Next and Qwen3.5-MoE: gated delta nets, gated attention, zero-centred norms."""
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    odd = {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "num_key_value_heads": 1, "head_dim": 24}
    qwen = {**_QWEN, "shared_expert_intermediate_size": 20, "linear_key_head_dim": 12, "linear_value_head_dim": 20}
    qwen35 = {key: value for key, value in qwen.items() if key != "intermediate_size"}
    return {
        # The output of the first token is its value times q k^T, which may be near 0. A large eps prevents the norm of
        # this output from amplifying rounding errors.
        "qwen3_next": transformers.Qwen3NextConfig(**{**qwen, "num_hidden_layers": 4}, **heads, rms_norm_eps=0.1),
        "qwen3_next, odd": transformers.Qwen3NextConfig(
            **{**qwen, "linear_key_head_dim": 9, "linear_conv_kernel_dim": 3},
            **odd,
            rms_norm_eps=1e-2,
            layer_types=["full_attention", "linear_attention"],
            norm_topk_prob=False,
            mlp_only_layers=[0],
            rope_parameters=_rope("default", 1e6, partial_rotary_factor=0.5),
        ),
        "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(
            **{**qwen35, "num_hidden_layers": 4}, **heads, rms_norm_eps=0.1
        ),
        "qwen3_5_moe, odd": transformers.Qwen3_5MoeTextConfig(
            **{**qwen35, "linear_value_head_dim": 15},
            **odd,
            layer_types=["linear_attention", "full_attention"],
            rms_norm_eps=1e-4,
        ),
    }


def _kimi_linear() -> dict[str, transformers.PretrainedConfig]:
    """Configs of Kimi-Linear: Kimi delta attention and latent attention without positions."""
    sizes = {"intermediate_size": 40, "moe_intermediate_size": 12, "num_experts": 8, "num_key_value_heads": 4}
    latent = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 10}
    common = {**_COMMON, **sizes, **latent, "num_hidden_layers": 3}
    return {
        # a large eps, as for Qwen3-Next
        "kimi_linear": transformers.KimiLinearConfig(
            **common,
            linear_num_heads=4,
            linear_head_dim=12,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            rms_norm_eps=0.1,
        ),
        "kimi_linear, odd": transformers.KimiLinearConfig(
            **{**common, "num_experts_per_tok": 4, "v_head_dim": 7, "tie_word_embeddings": True},  # without effect
            q_lora_rank=9,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            linear_num_heads=3,
            linear_head_dim=9,
            linear_conv_kernel_dim=3,
            layer_types=["full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense", "sparse"],
            rms_norm_eps=1e-2,
        ),
    }


def _nemotron() -> dict[str, transformers.PretrainedConfig]:
    """Configs of Nemotron-H with latent experts and with groups of experts, without the lower bound on time steps."""
    common = {key: value for key, value in _COMMON.items() if key != "num_hidden_layers"}
    sizes = {"intermediate_size": 40, "n_routed_experts": 8, "moe_intermediate_size": 12, "time_step_min": 1e-12}
    sizes |= {"moe_shared_expert_intermediate_size": 20}
    return {
        "nemotron_h": transformers.NemotronHConfig(
            **common,
            **sizes,
            layers_block_type=["linear_attention", "moe", "full_attention", "mlp", "moe"],
            num_key_value_heads=2,
            head_dim=8,
            ssm_state_size=10,
            mamba_num_heads=6,
            mamba_head_dim=5,
            n_groups=3,
            moe_latent_size=16,
            routed_scaling_factor=2.5,
        ),
        "nemotron_h, groups": transformers.NemotronHConfig(
            **{**common, "num_experts_per_tok": 4, "tie_word_embeddings": True},  # without effect
            **sizes,
            layers_block_type=["moe", "linear_attention", "full_attention"],
            num_key_value_heads=4,
            head_dim=12,
            ssm_state_size=16,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=1,
            conv_kernel=3,
            n_group=4,
            topk_group=2,
            layer_norm_epsilon=1e-4,
        ),
    }


def _softmax_routers() -> dict[str, transformers.PretrainedConfig]:
    """Configs of Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."""
    return {
        "mixtral": transformers.MixtralConfig(**_MIXTRAL, rope_parameters=_rope("default", 1e6)),
        "mixtral with a window": transformers.MixtralConfig(**_MIXTRAL, head_dim=12, sliding_window=5),
        "qwen2_moe": transformers.Qwen2MoeConfig(
            **{**_QWEN, "num_hidden_layers": 3},
            num_key_value_heads=2,
            shared_expert_intermediate_size=20,
            norm_topk_prob=False,
            mlp_only_layers=[1],
        ),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **_QWEN, num_key_value_heads=1, head_dim=16, norm_topk_prob=True, decoder_sparse_step=2
        ),
        "qwen3_moe tied, linear rope": transformers.Qwen3MoeConfig(
            **{**_QWEN, "tie_word_embeddings": True},
            num_key_value_heads=2,
            head_dim=8,
            norm_topk_prob=False,
            attention_bias=True,
            rope_parameters=_rope("linear", 5000.0, factor=3.0),
        ),
        "olmoe": transformers.OlmoeConfig(**_OLMOE, num_key_value_heads=2, norm_topk_prob=False),
        "olmoe, llama3 rope": transformers.OlmoeConfig(
            **_OLMOE, num_key_value_heads=4, norm_topk_prob=True, rope_parameters=_LLAMA3
        ),
    }


def _deepseek() -> dict[str, transformers.PretrainedConfig]:
    """Configs of DeepSeek-V2 with and without a q latent, V3, V3.2 and GLM with DSA; YaRN and both RoPE layouts."""
    return {
        # If both mscales are given, their ratio multiplies cos and sin instead of 0.1 ln(factor) + 1. The softmax scale
        # also depends on mscale_all_dim, which older versions of transformers ignored for V2 only.
        "deepseek_v2 lite, yarn": transformers.DeepseekV2Config(
            **_MLA,
            q_lora_rank=None,
            topk_method="greedy",
            rope_parameters={**_YARN, "mscale": 0.707, "mscale_all_dim": 1.0},
        ),
        "deepseek_v2 with q latent": transformers.DeepseekV2Config(**_MLA, q_lora_rank=16, routed_scaling_factor=4.0),
        # Transformers scores a group by its best expert. Megatron does the same only if group_topk equals topk.
        "deepseek_v2, groups": transformers.DeepseekV2Config(
            **{**_MLA, "num_experts_per_tok": 2},
            q_lora_rank=16,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
        ),
        "deepseek_v3, yarn": transformers.DeepseekV3Config(
            **{**_MLA, "num_experts_per_tok": 4},
            q_lora_rank=16,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        "deepseek_v32": transformers.DeepseekV32Config(
            **{**_MLA, "num_experts_per_tok": 4},
            **_INDEXER,
            q_lora_rank=16,
            n_group=4,
            topk_group=2,
            rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        ),
        "deepseek_v32, odd": transformers.DeepseekV32Config(
            **{**_MLA, "num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 7},
            **{**_INDEXER, "index_topk": 7, "index_n_heads": 16, "index_head_dim": 8},
            q_lora_rank=10,
            n_group=1,
            topk_group=1,
            rope_parameters=_rope("default", 100.0),
        ),
        "glm_moe_dsa": transformers.GlmMoeDsaConfig(
            **_MLA, **_INDEXER, q_lora_rank=16, rope_parameters=_rope("default", 1e3)
        ),
        "glm_moe_dsa, shared keys": transformers.GlmMoeDsaConfig(
            **{**_MLA, "num_hidden_layers": 6},
            **_INDEXER,
            q_lora_rank=16,
            index_topk_freq=3,
            index_skip_topk_offset=2,
            rope_parameters=_rope("default", 1e3),
        ),
        # transformers ignores mscale without mscale_all_dim: cos and sin are multiplied by 0.1 ln(factor) + 1.
        "deepseek_v3, no groups, half-split rope": transformers.DeepseekV3Config(
            **_MLA,
            q_lora_rank=None,
            n_group=1,
            topk_group=1,
            rope_interleave=False,
            rope_parameters={**_YARN, "mscale": 2.0},
        ),
    }


def _gpt_oss_and_glm() -> dict[str, transformers.PretrainedConfig]:
    """Configs of GPT-OSS (sinks, windows, clamped experts with biases) and GLM (partial RoPE, ungrouped sigmoid)."""
    return {
        "gpt_oss, yarn": transformers.GptOssConfig(
            **_COMMON,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=8,
            intermediate_size=12,
            sliding_window=5,
            swiglu_limit=1.5,  # small enough to clamp some values
            rope_parameters={**_YARN, "truncate": False},
        ),
        "glm4_moe": transformers.Glm4MoeConfig(
            **{**_GLM, "num_hidden_layers": 3},
            num_key_value_heads=2,
            head_dim=16,
            n_shared_experts=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            routed_scaling_factor=1.5,
            use_qk_norm=True,
            attention_bias=True,
            rope_parameters=_rope("default", 1e6, partial_rotary_factor=0.5),
        ),
        "glm4_moe air": transformers.Glm4MoeConfig(
            **_GLM,
            num_key_value_heads=4,
            head_dim=8,
            n_shared_experts=2,
            use_qk_norm=False,
            rope_parameters=_rope("default", 1e4, partial_rotary_factor=0.5),
        ),
    }


def _later_families() -> dict[str, transformers.PretrainedConfig]:
    """Configs of dots.llm1, ERNIE 4.5, GLM-4.7-Flash and MiniMax-M2, with an unusual shape or one more option each."""
    experts = {"intermediate_size": 40, "moe_intermediate_size": 12}
    return {
        "dots1, windows": transformers.Dots1Config(
            **{**_COMMON, "num_hidden_layers": 3},
            **experts,
            num_key_value_heads=2,
            head_dim=10,
            n_routed_experts=8,
            n_shared_experts=1,
            norm_topk_prob=True,
            first_k_dense_replace=1,
            routed_scaling_factor=2.5,
            sliding_window=5,
            max_window_layers=2,
        ),
        "dots1, groups": transformers.Dots1Config(
            **{**_COMMON, "num_experts_per_tok": 4},
            **experts,
            num_key_value_heads=4,
            n_routed_experts=12,
            n_shared_experts=2,
            n_group=4,
            topk_group=2,
            norm_topk_prob=True,
            sliding_window=None,
            attention_bias=False,
        ),
        "ernie4_5_moe": transformers.Ernie4_5_MoeConfig(
            **{**_COMMON, "num_hidden_layers": 3}, **experts, num_key_value_heads=2, moe_num_experts=8, moe_k=3
        ),
        "ernie4_5_moe, every other layer": transformers.Ernie4_5_MoeConfig(
            **{**_COMMON, "num_hidden_layers": 4, "hidden_size": 40, "tie_word_embeddings": True},
            **{**experts, "moe_intermediate_size": 7},
            num_key_value_heads=4,
            moe_num_experts=5,
            moe_k=2,
            moe_num_shared_experts=0,
            moe_layer_interval=2,
            rope_parameters=_rope("default", 1e4),
            rms_norm_eps=1e-3,
        ),
        "glm4_moe_lite": transformers.Glm4MoeLiteConfig(
            **{key: value for key, value in _MLA.items() if key != "first_k_dense_replace"}, q_lora_rank=16
        ),
        "glm4_moe_lite, odd": transformers.Glm4MoeLiteConfig(
            **{**_MLA, "num_experts_per_tok": 4, "v_head_dim": 7, "rms_norm_eps": 1e-3},
            q_lora_rank=9,
            n_group=4,
            topk_group=2,
            rope_interleave=False,
            mlp_layer_types=["dense", "dense", "sparse"],
        ),
        "minimax_m2": transformers.MiniMaxM2Config(
            **_COMMON,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=8,
            intermediate_size=12,
            rope_parameters=_rope("default", 5e6, partial_rotary_factor=0.5),
        ),
        "minimax_m2, odd": transformers.MiniMaxM2Config(
            **{**_COMMON, "num_experts_per_tok": 2, "num_hidden_layers": 3},
            num_key_value_heads=1,
            head_dim=10,
            num_local_experts=5,
            intermediate_size=7,
            rms_norm_eps=1e-3,
            rope_parameters=_rope("default", 1e4, partial_rotary_factor=0.4),
        ),
    }


def _compressed() -> dict[str, transformers.PretrainedConfig]:
    """Configs of DeepSeek-V4 with every kind of layer; one has YaRN and sizes that all differ.

    Terms cancel in the gradients of the residual streams' weights. With these numbers of streams, the gradients remain
    well above rounding errors.
    """
    common = {**_COMMON, "num_hidden_layers": 3, "n_routed_experts": 8, "moe_intermediate_size": 12}
    return {
        "deepseek_v4": transformers.DeepseekV4Config(
            **common,
            q_lora_rank=16,
            head_dim=16,
            qk_rope_head_dim=8,
            layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
            sliding_window=5,
            o_groups=2,
            o_lora_rank=6,
            index_n_heads=12,  # with few heads, several scores may be 0, and selection among ties is arbitrary
            index_head_dim=16,
            index_topk=2,
            hc_mult=2,
            num_hash_layers=1,
            swiglu_limit=1.5,
        ),
        "deepseek_v4, yarn": transformers.DeepseekV4Config(
            **{**common, "num_attention_heads": 6, "num_experts_per_tok": 2, "rms_norm_eps": 1e-4},
            q_lora_rank=9,
            head_dim=24,
            qk_rope_head_dim=6,
            layer_types=["compressed_sparse_attention", "sliding_attention", "compressed_sparse_attention"],
            sliding_window=7,
            o_groups=3,
            o_lora_rank=5,
            index_n_heads=16,
            index_head_dim=8,
            index_topk=3,
            hc_mult=5,
            hc_sinkhorn_iters=5,
            num_hash_layers=0,
            routed_scaling_factor=2.5,
            rope_parameters=_YARN,
        ),
    }


def hf_model(
    config: transformers.PretrainedConfig, seed: int = 7, kind: type = transformers.AutoModelForCausalLM
) -> transformers.PreTrainedModel:
    """Builds a model in fp32 with unit-gain weights. `kind`: the class that selects the model's class."""
    model = kind.from_config(config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32)
    fill(model, seed)
    return model.eval()


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" in name:
            continue
        if not tensor.is_floating_point():  # a table of expert ids
            scores = torch.rand(len(tensor), model.config.num_local_experts, generator=generator)
            tensor.copy_(scores.argsort(dim=1)[:, : tensor.shape[1]])
            continue
        mean, std = _distribution(name, tensor, isinstance(model, transformers.GptOssForCausalLM))
        tensor.copy_(mean + std * torch.randn(tensor.shape, generator=generator))


def _distribution(name: str, tensor: Tensor, transposed_experts: bool) -> tuple[float, float]:
    if tensor.dim() == 1 and "norm" in name:
        return 1.0, 0.1
    if name.endswith("bias"):
        return 0.0, 0.1
    if "embed_tokens" in name or name.endswith("sinks"):
        return 0.0, 1.0
    # GPT-OSS keeps its expert matrices as [experts, inputs, outputs], all other models with the inputs last.
    inputs = 1 if transposed_experts and tensor.dim() == 3 else -1
    return 0.0, float(tensor.shape[inputs]) ** -0.5


def saved(model: transformers.PreTrainedModel, folder: Path, max_shard_size: str = "5GB") -> Path:
    """Saves a model to a folder with the tensor names of published folders."""
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    published = _PUBLISHED_NAMES.get(model.config.model_type)
    if published is not None:
        for path in folder.glob("*.safetensors"):
            save_file({published(name): tensor for name, tensor in load_file(path).items()}, path)
        for path in folder.glob("*.index.json"):
            index = json.loads(path.read_text())
            index["weight_map"] = {published(name): file for name, file in index["weight_map"].items()}
            path.write_text(json.dumps(index))
    return folder


def _published_name(name: str) -> str:
    """Maps a DeepSeek-V4 tensor name of `save_pretrained` to the name in published folders."""
    name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
    return name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")


def _published_kimi_name(name: str) -> str:
    """Maps a Kimi-Linear tensor name of `save_pretrained`, which renames dense MLPs like experts, to that in published
    folders."""
    return re.sub(r"block_sparse_moe\.(\w+_proj)", r"mlp.\1", name)


_PUBLISHED_NAMES = MappingProxyType({"deepseek_v4": _published_name, "kimi_linear": _published_kimi_name})


def saved_gradients(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Saves gradients under the names of their weights, so that the rules for weights can read them."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    return saved(model, folder)


def tokens(batch: int = 2, length: int = 24) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))
