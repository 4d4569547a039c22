"""Environment variables that flags require, with the reasons. No other module sets variables for flags.

Precedence, highest first: environment of the process, `environment` section of files, values of this module.
"""

import re
import unicodedata
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from arguments import derive
from arguments.errors import Problem
from arguments.flags import Flags
from megatron_moe.config.transport import libraries

FROM_A_FILE = "set by a file"

_EXPANDABLE = "expandable_segments:True"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ALLOWED = (
    *("CUBLASLT_", "CUBLAS_", "CUDA_", "CUDNN_", "DEEPEP_", "DEEP_EP_", "FI_", "GLOO_", "GOMP_", "HF_", "HYBRID_EP_"),
    *("KMP_", "MEGATRON_", "MKL_", "NCCL_", "NUM_OF_", "NVIDIA_", "NVLINK_", "NVSHMEM_", "NVTE_", "OMP_", "PYTORCH_"),
    *("RDMAV_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "UCX_", "USE_MNNVL", "WANDB_"),
)
"""Prefixes of the environment variables that files may set: settings of the libraries that a run uses."""
_NAMES_CODE = re.compile(r"(?!HF_|WANDB_).*(_PATH|_PLUGIN|_DIR|_HOME|_LIB)")
"""Names of variables, such as NCCL_NET_PLUGIN and TRITON_PTXAS_PATH, whose values name code that libraries load or
run."""
_ACTION = re.compile(r"[a-z]*")
"""Values of PYTHONWARNINGS that name an action only. Others may import modules."""
_REFUSED = frozenset({"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "PYTHONINSPECT", "SHELLOPTS", "UID"})
"""Variables that scripts cannot set in a shell, or that prevent a rank from exiting."""


_TRANSFORMER_ENGINE = (
    "NVTE_BACKWARD_OVERRIDE",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION",
    "NVTE_NVFP4_DISABLE_RHT",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING",
)
"""Variables that change the FP8 and FP4 recipes of Transformer Engine."""


@dataclass(frozen=True)
class Variable:
    """Environment variable that must be set before torch is imported."""

    name: str
    value: str
    reason: str


def naming_problem(name: str) -> tuple[str, str]:
    """Returns (problem, remedy) if nothing can set the environment variable `name`, else two empty strings."""
    if not _NAME.fullmatch(name):
        return f"names the environment variable {name!r}", "use letters, digits and _, with no digit first"
    if name in _REFUSED:
        return f"sets {name}, which belongs to the shell or the interpreter", "remove it"
    return "", ""


def permission_problem(name: str, value: str, allowed: Collection[str]) -> tuple[str, str]:
    """Returns (problem, remedy) if a file must not set the environment variable, else two empty strings. Many variables
    make libraries run code. `allowed`: names given with `--allow-environment`."""
    known = name.startswith(_ALLOWED) and not _NAMES_CODE.fullmatch(name)
    if known or name in allowed or name == "PYTHONWARNINGS" and _ACTION.fullmatch(value):
        return naming_problem(name)
    what = f"sets the environment variable {name}, which may change what code runs"
    return naming_problem(name) if naming_problem(name)[0] else (what, f"remove it, or add --allow-environment {name}")


def character_problem(text: str) -> str:
    """Returns a phrase about the first character that must not enter a script or the environment, or an empty string if
    there is none: a control character (such as newline) or a surrogate (invalid Unicode)."""
    found = next((letter for letter in text if unicodedata.category(letter) in ("Cc", "Cs")), None)
    return f"which contains the character U+{ord(found):04X}" if found else ""


def required_variables(flags: Flags, from_files: Mapping[str, str], ranks_per_host: int) -> tuple[Variable, ...]:
    """Environment variables required by `flags` or set in `from_files`, which takes precedence."""
    wanted = {variable.name: variable for variable in _needed(flags, ranks_per_host)}
    wanted |= {name: Variable(name, value, FROM_A_FILE) for name, value in from_files.items()}
    return tuple(wanted.values())


def missing_variables(wanted: tuple[Variable, ...], environ: Mapping[str, str]) -> tuple[Variable, ...]:
    """Variables in `wanted` that `environ` does not set."""
    return tuple(variable for variable in wanted if variable.name not in environ)


def variable_notes(wanted: tuple[Variable, ...], environ: Mapping[str, str]) -> Iterator[str]:
    """Yields a note on each variable that this run sets, or that `environ` sets to another value, which is kept."""
    for variable in wanted:
        here = environ.get(variable.name)
        if here is None:
            yield f"environment: {variable.name}={variable.value} ({variable.reason})"
        elif here != variable.value:
            yield (
                f"environment: {variable.name}={here} is kept; this run would have set {variable.value} "
                f"({variable.reason})"
            )


def changed_recipes(environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem for each variable that selects another variant of an FP8 or FP4 recipe."""
    for name in _TRANSFORMER_ENGINE:
        if environ.get(name, "0") not in ("", "0"):
            what = f"the environment variable {name}={environ[name]}, which changes recipes of Transformer Engine"
            yield Problem(what=f"{what}, is not supported", remedy=f"unset {name}")


def _needed(flags: Flags, ranks_per_host: int) -> Iterator[Variable]:
    if flags.device == "cpu":
        return
    if flags.deterministic_mode:
        because = "--deterministic-mode: "
        yield Variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8", because + "cuBLAS is deterministic with fixed workspaces")
        yield Variable("NCCL_ALGO", "^NVLS", because + "reductions in NVLink switches have no fixed order")
        yield Variable(
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0", because + "disables nondeterministic kernels of Transformer Engine"
        )
    if flags.overlap_moe_expert_parallel_comm:
        reason = "--overlap-moe-expert-parallel-comm: kernels of two microbatches must not share a hardware queue"
        yield Variable("CUDA_DEVICE_MAX_CONNECTIONS", "32", reason)
    # libraries may be missing where the run starts
    if flags.num_experts and derive.expert_transport(flags, ranks_per_host, libraries()).transport.shares_memory:
        kind = flags.moe_token_dispatcher_type
        reason = f"--moe-token-dispatcher-type {kind}: tokens are written to single GPUs, without NVLink multicast"
        yield Variable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", reason)
    if flags.expert_model_parallel_size > 1:
        reason = "--expert-model-parallel-size: token counts per rank vary between steps, which fragments memory"
        yield Variable("PYTORCH_CUDA_ALLOC_CONF", _EXPANDABLE, reason)
        if flags.cuda_graph_impl != "none":
            reason = f"--cuda-graph-impl: NCCL must not register graph buffers allocated with {_EXPANDABLE}"
            yield Variable("NCCL_GRAPH_REGISTER", "0", reason)
