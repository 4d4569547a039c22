"""GEMMs that `--tp-comm-overlap` overlaps with communication, from its flags and the file of `--tp-comm-overlap-cfg`.

The file is that of Transformer Engine's user buffers. It maps names of GEMMs to settings; a GEMM that it omits keeps
the default. In addition, `false` switches the overlap of a GEMM off.

    qkv_fprop: {method: ring_exchange, aggregate: false}
    proj_fprop: {method: pipeline, num_sm: 24, num_splits: 4}
    fc1_dgrad: false
"""

from collections.abc import Iterator
from typing import Any

from arguments.errors import Problem
from arguments.files import read_yaml
from arguments.flags import Flags
from arguments.parser import Settings
from megatron_moe.config.parallel import ProcessInfo
from megatron_moe.config.run import RunPlan
from megatron_moe.config.tp_overlap import GEMMS, MIN_ROWS, NO_EFFECT, OVERLAPPED

_METHODS = ("ring_exchange", "pipeline", "bulk", "external")
_SETTINGS = (
    "num_sm", "cga_size", "set_sm_margin", "num_splits", "aggregate", "atomic_gemm", "is_reduce_scatter", "fp8_buf",
    "use_ce", "comm_priority", "gemm_priority",
)  # fmt: skip
"""Keys that choose a kernel or its resources in Transformer Engine."""


class OverlapFile(str):
    """Path of a file of `--tp-comm-overlap-cfg`, with the content of the file."""

    off: tuple[str, ...] = ()
    """Names of GEMMs that do not overlap."""
    ignored: tuple[str, ...] = ()
    """Keys without effect."""


def load_overlap_file(settings: Settings) -> None:
    """Adds the content of the file of `--tp-comm-overlap-cfg` to the value of the flag. The file is read only here,
    because it may be a pipe. Adds a problem to `settings.problems` if it is invalid."""
    name = "tp_comm_overlap_cfg"
    setting, option = settings.setting(name), settings.registry.flags[name].option
    if setting.value is None or isinstance(setting.value, OverlapFile):
        return
    try:
        settings.values[name] = setting._replace(value=read_overlap_file(setting.value))
    except ValueError as error:
        given = ((option, setting.value, setting.origin),)
        what = f"{option} {setting.value} {error}"
        settings.problems.append(Problem(what=what, remedy="correct the file", given=given))


def read_overlap_file(path: str) -> OverlapFile:
    """Reads the file. Raises ValueError with a message for the user if it cannot be read or has another format."""
    content = read_yaml(path)
    if not isinstance(content, dict):
        raise ValueError("must be a mapping of GEMMs, such as qkv_fprop, to settings")
    off, ignored = [], dict[str, None]()
    for name, settings in content.items():
        if name not in GEMMS:
            raise ValueError(f"has the unknown GEMM {name}; known are {', '.join(GEMMS)}")
        if settings is False:
            off.append(name)
            continue
        if not isinstance(settings, dict):
            raise ValueError(f"has {name}: {settings!r}, which is neither false nor a mapping of settings")
        ignored |= dict.fromkeys(_keys_without_effect(name, settings))
        if name not in OVERLAPPED:
            ignored[name] = None
    file = OverlapFile(path)
    file.off, file.ignored = tuple(off), tuple(ignored)
    return file


def _keys_without_effect(name: str, settings: dict[Any, Any]) -> list[str]:
    """Returns the keys of a GEMM's settings that have no effect. Raises ValueError for an unknown key or method."""
    unknown = [str(key) for key in settings if key != "method" and key not in _SETTINGS]
    if unknown:
        raise ValueError(f"has the unknown key {unknown[0]} in {name}; known are method, {', '.join(_SETTINGS)}")
    if settings.get("method", _METHODS[0]) not in _METHODS:
        methods = ", ".join(_METHODS)
        raise ValueError(f"has the unknown method {settings['method']} in {name}; known are {methods}")
    return [key for key in settings if key != "method"]


def gemms_of_flags(flags: Flags, launch: ProcessInfo) -> tuple[str, ...]:
    """Names of the GEMMs that overlap with communication; empty if `--tp-comm-overlap` is off or has no effect."""
    if not flags.tp_comm_overlap or flags.tensor_model_parallel_size == 1 or _why_off(flags, launch):
        return ()
    switches = (
        (flags.tp_comm_overlap_ag, ("qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad")),
        (flags.tp_comm_overlap_rs, ("proj_fprop", "fc2_fprop")),
        (flags.tp_comm_bulk_dgrad, ("qkv_dgrad", "fc1_dgrad")),
        (flags.tp_comm_bulk_wgrad, ("qkv_wgrad", "fc1_wgrad")),
    )
    off = set(_file_of(flags).off).union(*(names for is_on, names in switches if not is_on))
    return tuple(name for name in OVERLAPPED if name not in off)


def overlap_notes(flags: Flags, plan: RunPlan) -> Iterator[str]:
    """Yields notes on parts of `--tp-comm-overlap` that have no effect, or that may cost time."""
    if not flags.tp_comm_overlap or flags.tensor_model_parallel_size == 1:
        return
    reason = _why_off(flags, plan.process)
    if reason:
        yield f"{NO_EFFECT}: {reason}"
        return
    if plan.precision.low_precision is not None:
        yield f"{NO_EFFECT} on linear layers whose GEMMs are quantised"
    graphs = plan.cuda_graphs
    if flags.device != "cpu" and not (graphs.full_iteration or graphs.cuda_graph_modules):
        yield (
            "--tp-comm-overlap without CUDA graphs: its additional launches can take longer than it saves; "
            "--cuda-graph-impl full_iteration avoids them"
        )
    ignored = _file_of(flags).ignored
    if ignored:
        keys = ", ".join(ignored)
        yield f"without effect in {flags.tp_comm_overlap_cfg}: {keys} (copy engines communicate, without a kernel)"


def _file_of(flags: Flags) -> OverlapFile:
    file = flags.tp_comm_overlap_cfg or OverlapFile()
    assert isinstance(file, OverlapFile), f"load_overlap_file has not read {file}"
    return file


def _why_off(flags: Flags, launch: ProcessInfo) -> str:
    """Reason why nothing overlaps although `--tp-comm-overlap` was given; empty if there is none."""
    tp, on_host = flags.tensor_model_parallel_size, launch.local_world_size
    if launch.world_size > on_host and on_host % tp:
        return f"the {tp} tensor-parallel ranks are on several hosts (ranks per host: {on_host}), which share no memory"
    if flags.dynamic_context_parallel:
        return "--dynamic-context-parallel changes the number of positions per rank"
    rows = flags.seq_length * flags.micro_batch_size // (tp * flags.context_parallel_size)
    if flags.device != "cpu" and rows < MIN_ROWS:
        return f"a rank has {rows} rows per microbatch, and copies of fewer than {MIN_ROWS} rows do not save time"
    return ""
