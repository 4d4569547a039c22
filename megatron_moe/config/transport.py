"""Transports of expert-parallel ranks: how tokens reach the ranks of their experts, and which transport a run uses."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from megatron_moe.config.precision import OperandFormat
from megatron_moe.config.registry import TRANSPORTS


class SentCopies(Enum):
    """Number of copies of a token that dispatch sends; combine returns the same number of rows."""

    PER_CHOICE = "one per selected expert"
    PER_RANK = "one per rank with selected experts"
    PER_HOST = "one per host with selected experts, forwarded to its ranks"
    ALL_RANKS = "one per rank"


class RowBound(Enum):
    """Number of expert rows for which a dispatch allocates memory."""

    RECEIVED = "the rows that were received; the host reads their number"
    BOUNDED = "a multiple of the mean over ranks (`--moe-expert-rank-capacity-factor`)"
    ANY_ROUTING = "the rows that any routing can need"


_MODULES = "megatron_moe.moe.token_dispatcher."


def _no_options(config: Any) -> None:
    """Default of `ExpertTransport.options`, for a transport without options."""


@dataclass(frozen=True, kw_only=True)
class ExpertTransport:
    """Exchange of tokens between expert-parallel ranks. A transport changes no result."""

    name: str
    dispatcher: Any = _MODULES + "flex:FlexDispatcher"
    """Class of the token dispatcher (`Dispatcher`), or its name "package.module:class"; None if the transport is not
    implemented."""
    transport: Any = None
    """Class of the `Transport` that the flex dispatcher uses, or its name "package.module:class"; None for other
    dispatchers."""
    options: Callable[[Any], Any] = _no_options
    """Function that maps a `MoEConfig` to the options of the transport."""
    copies: SentCopies
    rows: RowBound
    can_gather_in_fc1: bool = False
    """Whether fc1 can gather its rows from the tokens (`RowFormats.gathers_in_fc1`); otherwise the transport delivers
    rows."""
    sends_fp8: bool = False
    """Whether the transport can send tokens and the gradient of combine in FP8 (`RowFormats`)."""
    host_reads: int = 0
    """Maximum number of host synchronisations per dispatch."""
    library: str | None = None
    """Python module of the library that the transport requires; None if it requires none."""
    spans_hosts: bool = False
    is_captured: bool = False
    """Whether CUDA graphs can contain the exchange, which requires static shapes and excludes host reads."""
    pads_experts: bool = True
    """Whether the transport supports `--moe-pad-expert-input-to-capacity`, with which every expert receives as many
    rows as its capacity."""
    computes_padding: bool = True
    """Whether the rows that pad experts to their capacity are computed like the others."""
    delivers_tokens: bool = False
    """Whether ranks receive tokens, and sort the choices of their experts, instead of one row per choice."""
    has_channels: bool = False
    """Whether tokens arrive in slots for the tokens of all ranks, which are allocated for the whole run."""
    buffer_bytes: Callable[[Any, int, float], float] = lambda config, num_ranks, size: 0.0
    """(`MoEConfig`, number of ranks, bytes of an activation) -> bytes of an additional buffer, which exists for the
    whole run."""
    sums_before_sending: bool = False
    """Whether combine sums the rows of all received tokens before it sends any sum."""
    sends_unneeded: bool = False
    """Whether tokens are also sent to ranks that hold none of their experts, and sums returned from these."""
    shares_memory: bool = False
    """Whether ranks write to the memory of the other ranks of their host."""

    def ranks_gathered_in_fc1(self, num_ranks: int) -> int | None:
        """Number of ranks whose tokens are saved if fc1 gathers its rows from them, 0 for one rank, whose router saves
        them anyway; None if fc1 saves rows."""
        if not self.can_gather_in_fc1 or (num_ranks > 1 and self.copies is not SentCopies.ALL_RANKS):
            return None
        return num_ranks if num_ranks > 1 else 0


@dataclass(frozen=True, kw_only=True)
class TokenExchange:
    """Exchange of tokens among the expert ranks of one layer, from which its memory and traffic follow."""

    transport: ExpertTransport
    width: int
    """Channels of an exchanged token."""
    num_experts: int
    topk: int
    num_groups: int | None = None
    """Number of expert groups in group-limited routing; None means no group limit."""
    group_topk: int | None = None
    rows: float
    """Number of rows that the experts of the most loaded rank process for one microbatch."""
    row_alignment: int = 1
    """Multiple to which the rows of an expert are padded."""
    formats: tuple[OperandFormat | None, OperandFormat | None] = (None, None)
    """FP8 formats of exchanged tokens and gradients; None means the format of the activations."""
    sums_before_sending: bool = False
    """See `ExpertTransport.sums_before_sending`."""
    buffer_bytes: float = 0.0
    """Bytes of a buffer of the transport, in addition to receive slots, for the whole run."""
    clone_bytes: float = 0.0
    """Bytes of expert weights and their gradients that a rank sends per microbatch, if all clones are in use."""


@dataclass(frozen=True, kw_only=True)
class PushConfig:
    """Options of symmetric memory and of DeepEP."""

    num_sms: int | None = None
    """Number of SMs that dispatch and combine kernels use (`--moe-flex-dispatcher-num-sms`); None means all SMs, or
    DeepEP's default."""


@dataclass(frozen=True, kw_only=True)
class HybridEPConfig:
    """Options of the HybridEP library (`--moe-flex-dispatcher-backend hybridep`): the branch of DeepEP that has
    `deep_ep.HybridEPBuffer`. None means the library's default."""

    num_sms: int | None = None
    """Number of SMs that a dispatch or combine kernel uses (`--moe-flex-dispatcher-num-sms`)."""
    fuse_permute: bool = False
    """Sorts rows in the kernels that send and receive them (`--moe-permute-fusion-into-hybridep`)."""
    num_blocks_permute: int | None = None
    num_blocks_unpermute: int | None = None
    num_sms_preprocessing: int | None = None


LOCAL = ExpertTransport(
    name="local",
    dispatcher=_MODULES + "local:LocalDispatcher",
    can_gather_in_fc1=True,
    copies=SentCopies.PER_CHOICE,
    rows=RowBound.RECEIVED,
    is_captured=True,
)
"""Transport of an expert-parallel group of one rank, which has all experts and sends nothing."""
ALLGATHER = ExpertTransport(
    name="allgather",
    dispatcher=_MODULES + "allgather:AllGatherDispatcher",
    can_gather_in_fc1=True,
    copies=SentCopies.ALL_RANKS,
    rows=RowBound.ANY_ROUTING,
    spans_hosts=True,
)
NCCL = ExpertTransport(
    name="nccl",
    dispatcher=_MODULES + "alltoall:AllToAllDispatcher",
    can_gather_in_fc1=True,
    host_reads=1,
    copies=SentCopies.PER_CHOICE,
    rows=RowBound.RECEIVED,
    spans_hosts=True,
)
ECHO = replace(
    NCCL,
    name="echo",
    dispatcher=_MODULES + "echo:EchoDispatcher",
    options=lambda config: config.echo,
    can_gather_in_fc1=False,
    pads_experts=False,
)
"""NCCL, with clones of busy experts on other ranks (`--moe-enable-echo`)."""
SYMMETRIC = ExpertTransport(
    name="symmetric",
    transport=_MODULES + "symmetric:SymmetricTransport",
    options=lambda config: config.push,
    copies=SentCopies.PER_RANK,
    rows=RowBound.BOUNDED,
    is_captured=True,
    sends_fp8=True,
    delivers_tokens=True,
    has_channels=True,
    shares_memory=True,
)
COPIES = replace(
    SYMMETRIC,
    name="copies",
    transport=_MODULES + "copies:CopyTransport",
    options=_no_options,
    sums_before_sending=True,
    sends_unneeded=True,
)
"""Symmetric memory, written by copy engines instead of kernels."""
HIERARCHICAL = ExpertTransport(
    name="hierarchical",
    transport=_MODULES + "hierarchical:HierarchicalTransport",
    host_reads=1,
    copies=SentCopies.PER_HOST,
    rows=RowBound.RECEIVED,
    delivers_tokens=True,
    spans_hosts=True,
)
DEEPEP_SMS = 20
"""Default number of SMs of DeepEP's kernels."""
_DEEPEP_SLOTS, _DEEPEP_SLOT_BYTES = 256, 8 + 128 * (8 + 4 + 4)
"""Tokens that a channel of DeepEP 1.2 can buffer per source rank, and bytes of each token in addition to its row:
source, and up to 128 expert ids, weights and scales (`Config::get_nvl_buffer_size_hint`)."""


def _deepep_buffer(config: Any, num_ranks: int, element_bytes: float) -> float:
    num_slots = (config.push.num_sms or DEEPEP_SMS) // 2 * num_ranks * _DEEPEP_SLOTS
    return float(num_slots * (config.experts.hidden_size * max(element_bytes, 2.0) + _DEEPEP_SLOT_BYTES))


DEEPEP = ExpertTransport(
    name="deepep",
    transport=_MODULES + "deepep:DeepEPTransport",
    options=lambda config: config.push,
    copies=SentCopies.PER_RANK,
    rows=RowBound.BOUNDED,
    library="deep_ep",
    sends_fp8=True,
    delivers_tokens=True,
    pads_experts=False,
    buffer_bytes=_deepep_buffer,
    sums_before_sending=True,
)
HYBRIDEP = ExpertTransport(
    name="hybridep",
    transport=_MODULES + "hybridep:HybridEPTransport",
    options=lambda config: config.hybridep,
    copies=SentCopies.PER_RANK,
    rows=RowBound.BOUNDED,
    library="hybrid_ep_cpp",
    spans_hosts=True,
    is_captured=True,
    computes_padding=False,
    has_channels=True,
)
NCCLEP = ExpertTransport(name="ncclep", dispatcher=None, copies=SentCopies.PER_RANK, rows=RowBound.BOUNDED)
"""NCCL EP, which Megatron-LM supports and for which this program has no backend."""
for _transport in (SYMMETRIC, COPIES, HIERARCHICAL, DEEPEP, HYBRIDEP, NCCLEP):
    TRANSPORTS.register(_transport.name, _transport)


def libraries() -> tuple[str, ...]:
    """Names of the Python modules that registered transports require."""
    found = (TRANSPORTS.get(name).library for name in TRANSPORTS.names())
    return tuple(library for library in found if library is not None)


class TransportChoice(NamedTuple):
    """Transport that `choose_transport` selected, and why."""

    transport: ExpertTransport
    note: str | None = None
    """Log line that names the transport and the reason for it; None if none is needed, e.g. if the flags name the
    transport."""
    replaces_request: bool = False
    """True if the transport differs from the one that `--moe-flex-dispatcher-backend` names."""


def choose_transport(
    dispatcher: str,
    backend: str,
    *,
    num_ranks: int,
    ranks_per_host: int | None,
    spans_hosts: bool,
    shares_memory: bool,
    has_peer_access: bool = True,
    expert_choice: bool = False,
    pads_experts: bool = False,
    missing_libraries: Collection[str] = (),
    clones_experts: bool = False,
) -> TransportChoice:
    """Chooses the transport of a run. This is the only place where the transport is decided.

    Args:
        dispatcher: `--moe-token-dispatcher-type`.
        backend: `--moe-flex-dispatcher-backend`, or `--moe-alltoall-backend` for the dispatcher "alltoall".
        num_ranks: ranks that together hold one copy of the experts (ep x etp).
        spans_hosts: whether some of these groups of ranks are on several hosts.
        shares_memory: whether the ranks are on GPUs, and the kernels for symmetric memory support the dtype.
        has_peer_access: whether the GPUs of a host can access each other's memory, which is known only there.
        expert_choice: whether experts choose tokens.
        pads_experts: whether the rows of each expert are padded to its capacity.
        missing_libraries: modules of `libraries` that are not installed.
        clones_experts: whether busy experts are cloned on other ranks, which only "alltoall" over NCCL supports.
    """
    if num_ranks == 1 or dispatcher == "local":
        return TransportChoice(LOCAL)
    if dispatcher == "allgather":
        return TransportChoice(ALLGATHER)
    if clones_experts:
        return TransportChoice(ECHO)
    given, ranks = f"--moe-token-dispatcher-type {dispatcher}", f"{num_ranks} expert ranks"
    per_host = TransportChoice(HIERARCHICAL, f"{given}: {ranks}, with {ranks_per_host} on a host, {_ONCE_PER_HOST}")
    if dispatcher == "alltoall":
        if backend == "nccl" or expert_choice or (spans_hosts and pads_experts):
            return TransportChoice(NCCL)
        if spans_hosts:
            return per_host
        exchange = f"{given}: {ranks} on one host exchange tokens through"
        if shares_memory and not has_peer_access:
            return TransportChoice(NCCL, f"{exchange} NCCL, because their GPUs cannot access each other's memory")
        if shares_memory:
            return TransportChoice(SYMMETRIC, f"{exchange} symmetric memory; --moe-alltoall-backend nccl selects NCCL")
        return TransportChoice(NCCL)
    replacement, through = (
        (per_host, _ONCE_PER_HOST) if spans_hosts else (TransportChoice(SYMMETRIC), "use symmetric memory")
    )
    if backend in ("auto", SYMMETRIC.name):
        return replacement
    requested: ExpertTransport = TRANSPORTS.get(backend)
    if requested.dispatcher is None:
        reason = "this program has no backend for the library"
    elif spans_hosts and not requested.spans_hosts:
        reason = f"it supports only the ranks of one host, of which there are {ranks_per_host}"
    elif pads_experts and not requested.pads_experts:
        reason = "it does not support padding experts to their capacity"
    elif requested.library in missing_libraries:
        reason = f"the module {requested.library} is not installed"
    else:
        return TransportChoice(requested)
    note = f"--moe-flex-dispatcher-backend {backend}: {reason}, so {ranks} {through} instead"
    return TransportChoice(replacement.transport, note, replaces_request=True)


def fallback_transport_note(choice: TransportChoice, *, spans_hosts: bool) -> str | None:
    """Note about the transport that replaces a library where it is not installed; None if no library is needed."""
    transport = choice.transport
    if transport.library is None:
        return None
    through = _ONCE_PER_HOST if spans_hosts else "use symmetric memory"
    return (
        f"--moe-flex-dispatcher-backend {transport.name}: where the module {transport.library} is not installed, "
        f"expert ranks {through} instead"
    )


_ONCE_PER_HOST = "send each token once per host, over NCCL"
