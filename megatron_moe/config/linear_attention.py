"""Base config of linear-attention mixers: input projection, short convolution, recurrence, gated norm, output
projection."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

from megatron_moe.config.attention import NormConfig
from megatron_moe.config.component import MixerConfig, ParamSpec, indivisible, linear_parameters
from megatron_moe.config.costs import TRAINING_FLOPS, ActivationSizes, FlopCount, SavedActivation, saved_tensor
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta
from megatron_moe.config.precision import LowPrecisionConfig

CPMode = Literal["headwise", "chunkwise"]
CHUNK = 64
"""Tokens per chunk of linear attention. Computations within a chunk are matmuls."""


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(MixerConfig):
    """Mixer with linear attention. Its heads are sharded over tensor- and context-parallel ranks."""

    num_key_heads: int
    """Number of heads of q and k (`--linear-num-key-heads`, `--mamba-num-groups`)."""
    num_value_heads: int
    """Number of heads of v, each with its own state [key_head_dim, value_head_dim]; a multiple of `num_key_heads`."""
    key_head_dim: int
    """Width of a head of q and k (`--linear-key-head-dim`, `--mamba-state-dim`)."""
    value_head_dim: int
    """Width of a head of v (`--linear-value-head-dim`, `--mamba-head-dim`)."""
    conv_width: int
    """Width of the short convolution in tokens (`--linear-conv-kernel-dim`)."""
    norm: NormConfig
    """Norm of the recurrence's output, without a bias: before the output gate is applied, or for Mamba after it. Its
    weight is never stored zero-centred."""
    cp_mode: CPMode = "headwise"
    """Context parallelism (`--linear-cp-mode`): headwise: all-to-all exchanges give each rank some heads for all
    positions. chunkwise: each rank computes all heads for its positions, and ranks pass the recurrent states on."""

    mixed_rows: ClassVar[bool] = False
    """`ParamMeta.mixed_rows` of the input projection."""
    solves_systems: ClassVar[bool] = False
    """Whether the recurrence solves a triangular system per chunk, for the delta rule."""

    @property
    def key_width(self) -> int:
        """Width of q over all heads, which is also that of k."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Width of v over all heads, which is also that of the output gate."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_input_widths(self) -> tuple[int, ...]:
        """Widths of the tensors that enter the short convolution, in the order of the rows of `in_proj`."""
        raise NotImplementedError

    @property
    def in_proj_widths(self) -> tuple[int, ...]:
        """Output widths of `in_proj`, in the order of its rows."""
        raise NotImplementedError

    @property
    def exchanged_channels(self) -> int:
        """Width of the recurrence's inputs and of its output. The gate, which has the width of the output, is not
        exchanged."""
        return sum(self.in_proj_widths)

    def shard(self, tp: int) -> Self:
        """Config with the heads of one of `tp` ranks."""
        return replace(self, num_key_heads=self.num_key_heads // tp, num_value_heads=self.num_value_heads // tp)

    def parameters(self, parallel: ParallelConfig) -> Iterator[ParamSpec]:
        linear = partial(linear_parameters, parallel=parallel, counted="attention")
        sections = self.in_proj_widths
        shape = (sum(sections), self.hidden_size)
        yield from linear("in_proj", shape, low="qkv_linear", tp_dim=0, splits=sections, mixed_rows=self.mixed_rows)
        spec = partial(ParamSpec, counted="attention")
        mixed = self.conv_input_widths
        conv = ParamMeta(role="vector", init="uniform", fan_in=self.conv_width, tp_dim=0, splits=mixed)
        yield spec(name="conv1d.weight", shape=(sum(mixed), self.conv_width), meta=conv)
        heads = ParamMeta(role="vector", init="decay_rate", tp_dim=0, decay=False)
        yield spec(name="A_log", shape=(self.num_value_heads,), meta=heads)
        shape = (self.hidden_size, self.value_width)
        yield from linear("out_proj", shape, low="attn_proj", tp_dim=1, init="output")

    def recurrence_macs_per_token(self) -> int:
        """Multiply-adds of the recurrence per token, as Megatron counts them."""
        raise NotImplementedError

    def flops(self, seq_length: int) -> FlopCount:
        """FLOPs of the short convolution and of the recurrence."""
        macs = self.conv_width * sum(self.conv_input_widths) + self.recurrence_macs_per_token()
        return FlopCount(core_attention=seq_length * TRAINING_FLOPS * macs)

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        options, num_ranks = "--tensor-model-parallel-size times --context-parallel-size", parallel.tp * parallel.cp
        if self.cp_mode == "chunkwise":
            options, num_ranks = "--tensor-model-parallel-size", parallel.tp
        return indivisible(options, num_ranks, self.num_key_heads, "key head") or indivisible(
            options, num_ranks, self.num_value_heads, "value head"
        )

    def context_parallel_traffic(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """See `MixerConfig`. headwise: all-to-alls of the inputs and the output of the recurrence. chunkwise:
        all-gathers of recurrent states and transitions, and of the last tokens of each chunk for the short convolution;
        backward reduce-scatters their gradients."""
        shard = self.shard(parallel.tp)
        if self.cp_mode == "chunkwise":
            state = shard.num_value_heads * self.key_head_dim * self.value_head_dim
            transition = shard.num_value_heads * (self.key_head_dim**2 if self.solves_systems else 1)
            tokens = (self.conv_width - 1) * sum(shard.conv_input_widths)
            rows = self._chunk_rows(parallel, sizes) * (parallel.cp - 1)
            return float(2 * rows * (state + transition + tokens) * sizes.activation_itemsize)
        return 2 * sizes.inner * shard.exchanged_channels * sizes.activation_itemsize * (parallel.cp - 1) / parallel.cp

    def _chunk_rows(self, parallel: ParallelConfig, sizes: ActivationSizes) -> int:
        """Number of chunks that a rank has in all sequences of the microbatch."""
        batch_size = max(1, sizes.inner * parallel.cp // sizes.length)
        return batch_size * (2 if parallel.cp_split == "zigzag" else 1)

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        return {"low": "" if parallel.sequence_parallel else "qkv_linear"}

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors saved by the mixer. The output gate is a view of the input projection's output; q, k and v are views
        of the convolution's output."""
        shard, tokens, size = self.shard(parallel.tp), sizes.inner, sizes.activation_itemsize
        tensor, heads = partial(saved_tensor, "attention"), tokens * shard.num_value_heads
        mixed = tokens * sum(shard.conv_input_widths)
        yield tensor("projection", "U C", tokens * sum(shard.in_proj_widths), size)
        if parallel.cp > 1 and self.cp_mode == "chunkwise":
            yield from self._chunk_tensors(shard, self._chunk_rows(parallel, sizes), sizes)
        else:
            if parallel.cp > 1:
                yield tensor("input of whole sequences", "U C", mixed, size)
            yield tensor("q, k and v", "U C", mixed, size)
            yield from self.recurrence_tensors(heads, sizes)
        yield tensor("output", "U N V", heads * self.value_head_dim, size)
        yield tensor("gated output", "U N V", heads * self.value_head_dim, size, {"low": "attn_proj"})

    def _chunk_tensors(self, shard: Self, rows: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Inputs of the ops for `rows` chunks, including the tokens that are added to read or write the state."""
        keys, heads, size = self.key_head_dim, shard.num_value_heads, sizes.activation_itemsize
        tensor, channels = partial(saved_tensor, "attention"), sum(shard.conv_input_widths)
        yield tensor("chunks with tokens before", "U C", (sizes.inner + rows * (self.conv_width - 1)) * channels, size)
        reading = sizes.inner + rows * keys
        yield tensor("q, k and v", "U C", reading * channels, size)
        yield from self.recurrence_tensors(reading * heads, sizes)
        if self.solves_systems:
            both = reading + rows * keys
            yield tensor("q, k and v of the transition", "U C", both * (2 * shard.key_width + heads * keys), size)
            yield from self.recurrence_tensors(both * heads, sizes)
        yield tensor("outputs of the transition", "U N K", sizes.inner * heads * keys, size)
        yield tensor("states", "N K V", rows * heads * keys * (keys + self.value_head_dim), size)

    def recurrence_tensors(self, heads: int, sizes: ActivationSizes) -> Iterator[SavedActivation]:
        """Tensors that the recurrence saves in addition to q, k, v and its output. `heads`: local tokens times value
        heads."""
        raise NotImplementedError

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Workspace of the backward of the recurrence when it computes the gradients of q and k: states, solutions of
        the triangular systems, stored values and reads (if there are systems), and gradients."""
        keys, values = self.key_head_dim, self.value_head_dim
        heads = sizes.inner * self.shard(parallel.tp).num_value_heads
        narrow = 2 * keys * values / CHUNK + 3 * values
        if self.solves_systems:
            narrow += 2 * keys + 2 * values
        return heads * (narrow * sizes.activation_itemsize + 2 * keys * sizes.internal_itemsize)
