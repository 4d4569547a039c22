"""Values that follow from other flags by Megatron's rules, for the checks and `resolve`."""

from inspect import signature
from pathlib import Path
from typing import Any, Final

from arguments.values import LayerPattern
from megatron_moe.config.attention import ContextExchange
from megatron_moe.pipeline.auto_layout import StageCosts, auto_layout
from megatron_moe.pipeline.layout import PipelineLayout, even_layout, parse_layout, virtual_stages

AUTO: Final = "auto"
"""Value of `--pipeline-model-parallel-layout` that requests a layout balanced by cost."""
YARN_LENGTH: Final = 4096
"""Original context length for YaRN if none is given."""


def ffn_hidden_size(ffn_hidden_size: int | None, hidden_size: int, swiglu: bool) -> int:
    """Defaults to four times the hidden size; with SwiGLU to two thirds of that, rounded down to a multiple of 64."""
    if ffn_hidden_size is not None:
        return ffn_hidden_size
    return int(4 * hidden_size * 2 / 3 / 64) * 64 if swiglu else 4 * hidden_size


def head_dim(kv_channels: int | None, hidden_size: int, num_attention_heads: int) -> int:
    """Defaults to hidden size / heads."""
    return hidden_size // num_attention_heads if kv_channels is None else kv_channels


def moe_layers(num_layers: int, num_experts: int | None, moe_layer_freq: LayerPattern) -> tuple[bool, ...]:
    """For each layer whether it has experts. A number n selects every n-th layer, starting with the first."""
    if not num_experts:
        return (False,) * num_layers
    if isinstance(moe_layer_freq, int):
        return tuple(layer % moe_layer_freq == 0 for layer in range(num_layers))
    return tuple(entry == 1 for entry in moe_layer_freq)


def expert_ranks(
    expert_model_parallel_size: int, expert_tensor_parallel_size: int | None, tensor_model_parallel_size: int
) -> int:
    """Number of ranks that share the experts of a layer. Expert tensor parallelism defaults to tensor parallelism."""
    return expert_model_parallel_size * (expert_tensor_parallel_size or tensor_model_parallel_size)


def experts_are_recorded(num_expert_ranks: int, bf16: bool, moe_grouped_gemm: bool) -> bool:
    """Whether experts are captured if `--cuda-graph-modules` is not given. The sequential and the fp32 grouped GEMM
    read token counts on the host, which a capture does not allow."""
    return num_expert_ranks == 1 and bf16 and moe_grouped_gemm


def windowed_layers(
    num_layers: int, window_size: tuple[int, int] | None, window_attn_skip_freq: LayerPattern | None
) -> tuple[bool, ...]:
    """For each layer whether attention is windowed. A number n exempts every n-th layer, starting with the n-th."""
    if window_size is None:
        return (False,) * num_layers
    if window_attn_skip_freq is None:
        return (True,) * num_layers
    if isinstance(window_attn_skip_freq, int):
        return tuple((layer + 1) % window_attn_skip_freq != 0 for layer in range(num_layers))
    return tuple(entry == 1 for entry in window_attn_skip_freq)


def rotated_layers(num_layers: int, no_rope_freq: LayerPattern | None) -> tuple[bool, ...]:
    """For each layer whether it has rotary embeddings. A number n exempts every n-th layer, starting with the n-th."""
    if no_rope_freq is None:
        return (True,) * num_layers
    if isinstance(no_rope_freq, int):
        return tuple((layer + 1) % no_rope_freq != 0 for layer in range(num_layers))
    return tuple(entry == 0 for entry in no_rope_freq)


def yarn_turns(yarn_beta_fast: float | None, yarn_beta_slow: float | None) -> tuple[float, float]:
    """YaRN's (beta_fast, beta_slow): rotations over the original context above which a dimension keeps its frequency,
    and below which it is interpolated."""
    return 32.0 if yarn_beta_fast is None else yarn_beta_fast, 1.0 if yarn_beta_slow is None else yarn_beta_slow


def context_exchanges(num_layers: int, cp_comm_type: tuple[str, ...]) -> tuple[ContextExchange, ...]:
    """Context-parallel exchange of each layer; a single value applies to all."""
    kinds: tuple[Any, ...] = tuple("allgather" if kind == "all_gather" else kind for kind in cp_comm_type)
    return kinds * num_layers if len(kinds) == 1 else kinds


def global_batch_size(global_batch_size: int | None, micro_batch_size: int, data_parallel_size: int) -> int:
    """Defaults to one microbatch per data-parallel rank."""
    return micro_batch_size * data_parallel_size if global_batch_size is None else global_batch_size


def tokenizer_type(tokenizer_type: str | None, vocab_file: str | None, merge_file: str | None) -> str | None:
    """Defaults to GPT2BPETokenizer if one of its files is given, as in Megatron-LM's `pretrain_gpt.py`."""
    return "GPT2BPETokenizer" if tokenizer_type is None and (vocab_file or merge_file) else tokenizer_type


def eval_iters(eval_iters: int | None, mock_data: bool, train_iters: int) -> int:
    """Defaults to 100 batches; on mock data, whose loss is meaningless, at most the number of training iterations."""
    if eval_iters is not None:
        return eval_iters
    return min(100, train_iters) if mock_data else 100


def save_folder(
    save: str | None,
    run_dir: str | None,
    mock_data: bool,
    save_interval: int | None,
    save_hf_interval: int | None,
    moe_use_upcycling: bool,
    ckpt_step: int | None,
) -> Path | None:
    """Defaults to `checkpoints` in the run folder, except on mock data if no checkpoint flag is given."""
    if save:
        return Path(save)
    checkpoint_flags = save_interval or save_hf_interval or moe_use_upcycling or ckpt_step is not None
    return Path(run_dir) / "checkpoints" if run_dir and (checkpoint_flags or not mock_data) else None


def pad_vocab_size(
    vocab_size: int,
    make_vocab_size_divisible_by: int,
    tensor_model_parallel_size: int,
    padded_vocab_size: int | None,
    pad_vocab_size: bool,
) -> int:
    """Rounds the vocabulary up to a multiple of the padding unit times the tensor-parallel size."""
    if padded_vocab_size is not None:
        return padded_vocab_size
    unit = make_vocab_size_divisible_by * tensor_model_parallel_size if pad_vocab_size else 1
    return -(-vocab_size // unit) * unit


def pipeline_layout(
    *,
    num_layers: int,
    mtp_num_layers: int | None,
    pipeline_model_parallel_size: int,
    pipeline_model_parallel_layout: str | None,
    num_layers_per_virtual_pipeline_stage: int | None,
    num_virtual_stages_per_pipeline_rank: int | None,
    decoder_first_pipeline_num_layers: int | None,
    decoder_last_pipeline_num_layers: int | None,
    account_for_embedding_in_pipeline_split: bool,
    account_for_loss_in_pipeline_split: bool,
    costs: StageCosts | None = None,
) -> PipelineLayout:
    """Assigns layers to stages. `auto` balances `costs`; without them all layers cost the same.

    Raises LayoutError.
    """
    pp, num_mtp, vpp = pipeline_model_parallel_size, mtp_num_layers or 0, num_virtual_stages_per_pipeline_rank or 1
    counted = num_layers + account_for_embedding_in_pipeline_split + account_for_loss_in_pipeline_split
    if num_layers_per_virtual_pipeline_stage is not None:
        vpp = virtual_stages(counted, pp=pp, per_virtual_stage=num_layers_per_virtual_pipeline_stage)
    if pipeline_model_parallel_layout == AUTO:
        costs = costs or StageCosts(layers=(1.0,) * num_layers)
        return auto_layout(costs, pp=pp, vpp=vpp, num_mtp=num_mtp)
    if pipeline_model_parallel_layout is not None:
        return parse_layout(pipeline_model_parallel_layout, pp=pp, num_layers=num_layers, num_mtp=num_mtp)
    return even_layout(
        num_layers,
        pp=pp,
        vpp=vpp,
        num_mtp=num_mtp,
        first=decoder_first_pipeline_num_layers,
        last=decoder_last_pipeline_num_layers,
        account_for_embedding=account_for_embedding_in_pipeline_split,
        account_for_loss=account_for_loss_in_pipeline_split,
    )


PLACEMENT: Final = tuple(name for name in signature(pipeline_layout).parameters if name != "costs")
"""Flags that determine the pipeline layout."""
