"""Protocol of components: the mixer and the feed-forward module of a transformer layer.

A component is a frozen config without torch, which states every fact that other parts of the program need, and a module
that computes it. Cost model, planner, memory emulation, checkpoints and builders only call the methods of this file, so
a new component is one config and one module, registered by name (`config/registry.py`). `tests/examples/` has examples.

Sizes that methods return are those of one rank. Letters in shapes, as in docs/shapes.md:

  T tokens of the residual stream: S / (cp * tp) * B with sequence parallelism, otherwise S / cp * B
  U tokens inside attention and MLP: S / cp * B
  R rows of the local experts     N, G local heads and query groups     D, E q and v head dims
  H hidden size                   F local ffn channels
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from megatron_moe.config.costs import TRAINING_FLOPS, ActivationSizes, ExpectedRows, FlopCount, SavedActivation
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.config.param_meta import ParamMeta, local_boxes
from megatron_moe.config.precision import LowPrecisionConfig
from megatron_moe.config.text import counted, divisors
from megatron_moe.config.transport import TokenExchange, TransportChoice

UNSHARDED = ParallelConfig()
"""Parallel config of a single rank, for properties of unsharded modules."""
Counted = Literal[
    "embedding", "attention", "dense_mlp", "router", "experts", "shared", "latent", "norms", "connections", "head"
]


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """Declaration of one parameter of a module: name, global shape, metadata, and how it is counted."""

    name: str
    """Name relative to the module: "linear_qkv.weight"."""
    shape: tuple[int, ...]
    """Shape of the global tensor."""
    meta: ParamMeta
    counted: Counted
    """Field of `ParamCount` in which the parameter is counted."""
    low: str = ""
    """Value of `--low-precision-activation-modules` for the linear layer; empty if FP8 and FP4 recipes never quantise
    it."""
    active_experts: int | None = None
    """Number of experts that process a token, for parameters with an expert dim; None for other parameters."""
    recomputed_by: tuple[str, ...] = ()
    """Values of `--recompute-modules` that repeat the linear layer in backward."""
    flops_per_element: int = TRAINING_FLOPS
    """Training FLOPs per token and element of a matrix. Less than `TRAINING_FLOPS` if backward computes no gradient of
    the input or of the weight."""
    reads_gathered: bool = False
    """Whether a column-parallel matrix reads an input that was gathered for another matrix."""

    @property
    def elements(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def active_elements(self) -> int:
        """Number of elements that process one token."""
        return self.elements if self.active_experts is None else self.elements // self.shape[0] * self.active_experts

    def named(self, name: str) -> "ParamSpec":
        """Copy with another name. A search of the planner makes a million copies, which take long with `replace`."""
        other = object.__new__(ParamSpec)
        other.__dict__.update(self.__dict__, name=name)
        return other

    def local_numel(self, parallel: ParallelConfig) -> int:
        """Number of elements that one rank stores."""
        tp = parallel.etp if self.meta.grid == "expert" else parallel.tp
        boxes = local_boxes(self.shape, self.meta, tp=(0, tp), ep=(0, parallel.ep))
        return sum(prod(box.size) for box in boxes)


MegatronName = str | tuple[str, ...]
"""Name of a tensor in Megatron checkpoints, or names of tensors that are concatenated along their last dim."""


@dataclass(frozen=True)
class NameRule:
    """Mapping between a parameter and its Hugging Face tensors. If `hf_names` contain the placeholder `{e}` (expert
    index), the rule maps each expert's slice of our stacked tensor."""

    name: str
    """Parameter name relative to the component."""
    hf_names: tuple[str, ...]
    """Hugging Face tensor names relative to the layer."""
    transform: str = "copy"
    """Key of `TRANSFORMS` in checkpoint/huggingface/weight_map.py, or "package.module:name" of another `Transform`."""
    arguments: tuple[int, ...] = ()
    """Arguments of the transform, if it depends on sizes."""
    num_experts: int = 0


@dataclass(frozen=True, kw_only=True)
class Component:
    """Base of the configs of mixers and feed-forward modules. Methods have defaults for modules without the respective
    feature."""

    module: ClassVar[str]
    """Class of the module: "package.file:Class", imported when the model is built."""
    registered_as: ClassVar[str]
    """Name in registry `MIXERS` or `FEED_FORWARDS`, which is the value of `--mixer` or `--feed-forward`."""
    selecting_flags: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Flags with which the value "auto" of `--mixer` or `--feed-forward` selects the component, in the form of
    `as_flags`; empty if "auto" never selects it."""
    present: ClassVar[bool] = True
    """False for `NoMixer` and `NoFeedForward`, which have no module, norm and residual branch."""
    memory_labels: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Maps the path of a submodule (empty for the module itself) to the `SavedActivation.module` of the tensors that it
    allocates."""
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    """Maps parameter names relative to the layer to the alternative names that Megatron checkpoints may use."""

    def as_flags(self) -> Mapping[str, Any]:
        """Values of the flags from which the registered function makes this config: {"kv_channels": 128}.

        A flag that selects or counts layers (`--window-attn-skip-freq`, `--moe-n-hash-layers`) has the value True if it
        applies to this layer, otherwise False.
        The hidden size and training options, such as the load-balancing loss, are left out.
        """
        return {}

    @property
    def recompute_modules(self) -> tuple[str, ...]:
        """Values of `--recompute-modules` that apply to the module."""
        return ()

    def parameters(self, parallel: ParallelConfig) -> Iterable[ParamSpec]:
        """All parameters of the module, in any order."""
        raise NotImplementedError

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterable[SavedActivation]:
        """Tensors that the module saves for backward, except its input, which is the output of a norm."""
        raise NotImplementedError

    def saved_input_fields(self, parallel: ParallelConfig) -> Mapping[str, Any]:
        """Fields of `SavedActivation` for the module's input."""
        return {}

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes of gradients and kernel workspace in backward, without the gradients of the residual stream and of
        the module's input. `low`: FP8 or FP4 recipe of the layer."""
        raise NotImplementedError

    def forward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Peak bytes that forward allocates in addition to its output and to saved and recomputed tensors."""
        return 0.0

    def flops(self, seq_length: int) -> FlopCount:
        """Training FLOPs of one sequence in addition to the GEMMs with the parameters of role "matrix"."""
        return FlopCount()

    def gathered_channels(self, parallel: ParallelConfig) -> int:
        """Channels that tensor parallelism all-gathers in forward, and reduce-scatters in backward, in addition to the
        inputs of column-parallel and the outputs of row-parallel linear layers."""
        return 0

    def layout_problem(self, parallel: ParallelConfig) -> str | None:
        """Returns an error message if the sizes of the module cannot be sharded over these ranks, else None."""
        return None

    def gemm_sizes(self, parallel: ParallelConfig) -> Iterator[tuple[str, int, int]]:
        """Yields (flag, size, number of ranks that shard it) of GEMM dimensions whose size affects kernel speed."""
        yield from ()

    def name_rules(self, model_type: str) -> Iterable[NameRule]:
        """Names of the parameters in Hugging Face folders of a `model_type`."""
        return ()


@dataclass(frozen=True, kw_only=True)
class MixerConfig(Component):
    """Base of the configs of mixers, which map the tokens of a sequence to tokens: attention or a replacement."""

    hidden_size: int

    memory_labels: ClassVar[Mapping[str, str]] = MappingProxyType({"": "attention"})
    node_name: ClassVar[str] = "attention"
    """Name of the node that runs the mixer. `graph_module` maps it to the value of `--cuda-graph-modules` that captures
    it."""

    @property
    def rotary_tables(self) -> tuple[Any, ...]:
        """`RopeConfig`s whose cos and sin tables the module reads from the microbatch context."""
        return ()

    def context_parallel_traffic(self, parallel: ParallelConfig, sizes: ActivationSizes) -> float:
        """Bytes that one rank sends to other context-parallel ranks for one microbatch, forward and backward."""
        return 0.0

    def ring_channels(self, parallel: ParallelConfig) -> int:
        """Channels of keys and values that one rank sends around the ring of context-parallel ranks, overlapped with
        computation; 0 if the mixer has no ring."""
        return 0

    def gathered_context_channels(self, parallel: ParallelConfig) -> int:
        """Channels of the widest tensor that the mixer gathers from all context-parallel ranks; 0 if there is none."""
        return 0

    def with_unpublished_settings(self, run_config: "MixerConfig", norm: Any) -> "MixerConfig":
        """Returns this config, which was read from a config.json, with the settings that a config.json does not contain
        taken from `run_config`. `norm`: norm of the layer."""
        return self


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Component):
    """Base of the configs of feed-forward modules, which process every token independently."""

    memory_labels: ClassVar[Mapping[str, str]] = MappingProxyType({"": "mlp"})
    megatron_names: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",)}
    )
    whole_module: ClassVar[str] = "mlp"
    """Value of `--recompute-modules` that recomputes the whole module."""

    @property
    def routed_experts(self) -> Any:
        """`MoEConfig` of the experts among which tokens are exchanged; None if there are none."""
        return None

    @property
    def num_routed_experts(self) -> int:
        """Number of routed experts, which expert-parallel ranks share; 0 if there are none."""
        return 0

    @property
    def can_overlap_microbatches(self) -> bool:
        """Whether the exchange of tokens can overlap with computation of another microbatch."""
        return True

    @property
    def uses_route_kernel(self) -> bool:
        """Whether the `route` kernel selects the experts, so that a memory emulation can replace the selection."""
        return True

    def choose_transport(self, parallel: ParallelConfig, *, has_peer_access: bool = True) -> TransportChoice | None:
        """Transport of the exchange of tokens with other ranks; None if the module exchanges no tokens.
        `has_peer_access`: whether GPUs of a host can access each other's memory."""
        return None

    def assumed_load_problems(self, parallel: ParallelConfig, imbalance: float) -> Iterator[tuple[str, str]]:
        """Yields (what, remedy) of each reason why an emulation cannot assume that the experts of one rank get
        `imbalance` times a balanced share of the rows."""
        yield from ()

    def without_host_reads(self) -> "FeedForwardConfig":
        """Returns a config with the same costs whose module reads no tensor on the host, so that it runs on the `meta`
        device."""
        return self

    def exchange(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> TokenExchange | None:
        """Exchange of tokens with other ranks; None if there is none. `low`: FP8 or FP4 recipe of the layer."""
        return None

    def expected_rows(self, parallel: ParallelConfig, num_tokens: int) -> ExpectedRows | None:
        """Rows of a rank's experts for one microbatch with `num_tokens` tokens per rank; None if there are no experts,
        or if experts choose their tokens."""
        return None

    def delayed_wgrad_bytes(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        """Bytes of the operands of delayed expert weight gradients that one microbatch keeps after its backward."""
        return 0.0


def indivisible(option: str, num_ranks: int, size: int, noun: str) -> str | None:
    """Returns an error message if the number of ranks does not divide `size`, else None. `option`: flag that sets the
    number of ranks; `noun`: what `size` counts."""
    if size % num_ranks == 0:
        return None
    return f"{num_ranks} ranks ({option}) do not divide {counted(size, noun)}; divisors: {divisors(size, num_ranks)}"


class _Absent(Component):
    """Base of the configs of absent modules, which have no parameters and no costs."""

    present: ClassVar[bool] = False
    registered_as: ClassVar[str] = "none"

    def parameters(self, parallel: ParallelConfig) -> Iterable[ParamSpec]:
        return ()

    def saved_tensors(self, parallel: ParallelConfig, sizes: ActivationSizes) -> Iterable[SavedActivation]:
        return ()

    def backward_workspace(
        self, parallel: ParallelConfig, sizes: ActivationSizes, low: LowPrecisionConfig | None
    ) -> float:
        return 0.0


@dataclass(frozen=True, kw_only=True)
class NoMixer(_Absent, MixerConfig):
    """Config for layers without a mixer."""


@dataclass(frozen=True, kw_only=True)
class NoFeedForward(_Absent, FeedForwardConfig):
    """Config for layers without a feed-forward module."""


def linear_parameters(
    name: str,
    shape: tuple[int, int],
    parallel: ParallelConfig,
    *,
    counted: Counted,
    low: str,
    bias: bool = False,
    tp_dim: Literal[0, 1] | None = None,
    recomputed_by: tuple[str, ...] = (),
    flops_per_element: int = TRAINING_FLOPS,
    reads_gathered: bool = False,
    **options: Any,
) -> Iterator[ParamSpec]:
    """Yields the weight, named `name`.weight, and with `bias` the bias of a `Linear`. `shape`: (outputs, inputs);
    `tp_dim` and `options`: fields of `ParamMeta`; other keyword arguments: fields of `ParamSpec`."""
    partial = parallel.sequence_parallel and tp_dim is None
    meta = ParamMeta(role="matrix", fan_in=shape[1], tp_dim=tp_dim, partial_over_tp=partial, **options)
    yield ParamSpec(
        name=f"{name}.weight",
        shape=shape,
        meta=meta,
        counted=counted,
        low=low,
        recomputed_by=recomputed_by,
        flops_per_element=flops_per_element,
        reads_gathered=reads_gathered,
    )
    if bias:
        meta = replace(
            meta,
            role="bias",
            init="zeros",
            fan_in=1,
            tp_dim=0 if tp_dim == 0 else None,
            decay=False,
            partial_over_tp=parallel.sequence_parallel and tp_dim != 0,
        )
        yield ParamSpec(name=f"{name}.bias", shape=shape[:1], meta=meta, counted=counted)
