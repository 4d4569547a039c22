"""Converts between Hugging Face folders and checkpoints on CPU, holding one tensor in memory at a time.

    python tools/convert_checkpoint.py --load hf:models/Qwen3-30B-A3B --save checkpoints/qwen3
    python tools/convert_checkpoint.py --load runs/my/checkpoints --save hf:exports/my

`--pretrained-checkpoint checkpoints/qwen3` starts a run from the first output. An export has the config.json of
`--hf-config` or of the folder from which the run started; for other models it is generated. All other arguments are
flags of pretrain_moe.py; they override config.json or the settings of the run that wrote the checkpoint. conversion.md
in the output folder lists every tensor. Exit code 0: done; 12: --compare-logits found a difference.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

import torch
from torch import Tensor

from arguments.errors import FlagErrors, Problem
from arguments.flags import Registry
from arguments.hf_source import command_line_of
from arguments.huggingface import exported_config
from arguments.read import read_plan
from megatron_moe.api import plan_of_checkpoint
from megatron_moe.build import build_train_state_config
from megatron_moe.checkpoint.directory import as_checkpoint, find_checkpoints
from megatron_moe.checkpoint.huggingface.config_map import model_config_from_hf, with_latent_norms_of
from megatron_moe.checkpoint.huggingface.convert import ConversionReport, from_hf, to_hf
from megatron_moe.checkpoint.huggingface.export import SHARD_BYTES, tokenizer_files, write_template
from megatron_moe.checkpoint.huggingface.folder import CONFIG, read_config, weights_dtype
from megatron_moe.config.checkpoint import HUGGING_FACE
from megatron_moe.config.exit_codes import CheckpointProblem, EnvironmentProblem, ExitCode
from megatron_moe.config.model_differences import config_differences
from megatron_moe.config.run import KernelConfig, RunPlan
from megatron_moe.cost_model.parameters import count_parameters
from megatron_moe.data.batch import MicrobatchContext, TokenMeta
from megatron_moe.data.tokenizer import local_copy, vocab_size_of
from megatron_moe.kernels.reference.backend import bundle
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel.context import ParallelContext, torch_dtype
from megatron_moe.train.train_state import TrainState
from tools._common import positive, reports_errors, run_main, tool_parser
from tools.generate import load_model

REPORT = "conversion.md"
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?)([KMG]?B|)", re.IGNORECASE)
_UNITS = MappingProxyType({"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1, "": 1})
_MAX_PARAMETERS_PER_BYTE = 16
"""Maximum ratio of model parameters to bytes of weight files. A larger ratio means wrong sizes in the flags."""
_RELATIVE_TOLERANCE = 1e-4
"""Tolerance for logits, relative to the largest: above fp32 rounding errors, but below the effect of a wrong weight."""


@dataclass(frozen=True)
class Outcome:
    """Folders and report of a finished conversion."""

    report: ConversionReport
    output: Path
    """Folder to which the report (conversion.md) is written."""
    huggingface: Path
    checkpoint: Path
    plan: RunPlan
    dtype: torch.dtype | None = None
    """Dtype to which an export rounds the parameters; None if it keeps their dtypes."""


@reports_errors
def main(argv: Sequence[str]) -> int:
    options, flags = _parser().parse_known_args(argv)
    load, save = options.load, options.save
    if load.startswith(HUGGING_FACE) == save.startswith(HUGGING_FACE):
        what = f"one of --load {load} and --save {save} must be hf:FOLDER, the other a folder of checkpoints"
        raise FlagErrors([Problem(what=what)])
    convert = _from_hugging_face if load.startswith(HUGGING_FACE) else _to_hugging_face
    outcome = convert(options, flags)
    code = ExitCode.OK
    try:
        if options.compare_logits:
            line, same = _compare_logits(outcome, options.compare_logits)
            outcome.report.notes.append(line)
            code = ExitCode.OK if same else ExitCode.DRIFT
    finally:  # writes the report even if the comparison fails, because the conversion is complete
        (outcome.output / REPORT).write_text(outcome.report.text(), encoding="utf-8")
    for note in outcome.report.notes:
        print(note)
    rows, seconds = len(outcome.report.rows), outcome.report.seconds
    print(f"{outcome.report.source} -> {outcome.report.target}: {rows} tensors in {seconds:.1f} s; see {REPORT}")
    return code


def _from_hugging_face(options: argparse.Namespace, flags: Sequence[str]) -> Outcome:
    folder, save = Path(options.load.removeprefix(HUGGING_FACE)), Path(options.save)
    plan = read_plan([*_flags_of_folder(folder), *flags], {}, vocab_size_of=vocab_size_of)
    texts = {"run.yaml": plan.resolved_yaml}
    train_state = TrainState().to_json(build_train_state_config(plan))
    report = from_hf(folder, save, build_meta_model(plan, folder), plan.model, train_state, texts)
    return Outcome(report, save, folder, report.target, plan)


def _flags_of_folder(folder: Path) -> list[str]:
    """Flags for the model of a Hugging Face folder, in the dtype of its weights."""
    config = read_config(folder)
    flags = command_line_of(folder, Registry.declared())
    flags.append("--bf16" if weights_dtype(folder, config) == "BF16" else "--no-bf16")
    # a top-1 router may have no gradient, which flag rules reject in training
    flags += ["--skip-train"] if config.get("num_experts_per_tok") == 1 else []
    return flags


def _to_hugging_face(options: argparse.Namespace, flags: Sequence[str]) -> Outcome:
    output = Path(options.save.removeprefix(HUGGING_FACE))
    candidate = find_checkpoints(Path(options.load))[0]
    plan = plan_of_checkpoint(candidate, ["--device", "cpu", *flags])
    dtype = None if options.dtype == "keep" else torch_dtype(options.dtype)
    shard_bytes, model = _parse_size(options.shard_size), build_meta_model(plan, candidate.path)
    with TemporaryDirectory() as generated:
        template, note = options.hf_config or _template(plan), ""
        if template is None:
            template, note = Path(generated), _generate(plan, Path(generated))
        report = to_hf(candidate.path, output, model, plan.model, template, dtype=dtype, shard_bytes=shard_bytes)
    report.notes += [note] if note else []
    return Outcome(report, output, output, candidate.path, plan, dtype)


def _generate(plan: RunPlan, folder: Path) -> str:
    """Writes config.json, generation config and tokenizer files of a model to `folder`; returns a note about them."""
    values = exported_config(plan.model, plan.data.vocab_size, Registry.declared())
    write_template(folder, values, plan.data.tokenizer)
    tokenizer = "with its tokenizer" if tokenizer_files(plan.data.tokenizer) else "without tokenizer files"
    return (
        f"config.json is generated, {tokenizer}; the class {values['architectures'][0]} of transformers loads the "
        "folder"
    )


def build_meta_model(plan: RunPlan, folder: Path) -> GPT:
    """Builds the unsharded model on the meta device, in the dtypes of the run.

    Raises CheckpointProblem if the model has far more parameters than the files of `folder` can hold.
    """
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    num_parameters = count_parameters(plan.model).total
    if num_parameters > _MAX_PARAMETERS_PER_BYTE * num_bytes:
        raise CheckpointProblem(
            f"the flags and config.json describe a model of {num_parameters:,} parameters, but {folder} holds "
            f"{num_bytes:,} bytes; correct the model's sizes"
        )
    context = ParallelContext.single(dtype=torch_dtype(plan.precision.params), device="meta")
    return GPT(plan.model, context, bundle())


def _template(plan: RunPlan) -> Path | None:
    """Hugging Face folder that the run loaded its weights from, or that of its tokenizer if its config.json describes
    the run's model; None if there is neither."""
    loaded = (plan.checkpoint.load, plan.checkpoint.pretrained_checkpoint)
    folders = [Path(path.removeprefix(HUGGING_FACE)) for path in loaded if path and path.startswith(HUGGING_FACE)]
    if plan.data.tokenizer.tokenizer_model is not None:
        folder = local_copy(plan.data.tokenizer.tokenizer_model)
        folders += [folder] if (folder / CONFIG).is_file() and _describes(folder, plan) else []
    return next((folder for folder in folders if (folder / CONFIG).is_file()), None)


def _describes(folder: Path, plan: RunPlan) -> bool:
    try:
        published = model_config_from_hf(read_config(folder), mtp=plan.model.mtp is not None)
    except CheckpointProblem:
        return False
    return not config_differences(plan.model, with_latent_norms_of(plan.model, published))


@torch.no_grad()
def _compare_logits(outcome: Outcome, num_positions: int) -> tuple[str, bool]:
    """Compares the logits of the transformers model and of this project's model on the same random tokens, in fp32.

    Returns a sentence with the largest difference, and whether it is within tolerance. Raises EnvironmentProblem if
    transformers is not installed or cannot load the folder.
    """
    vocab_size = int(read_config(outcome.huggingface)["vocab_size"])
    tokens_BS = torch.randint(0, vocab_size, (1, num_positions), generator=torch.Generator().manual_seed(1))
    expected_SV = _transformers_logits(outcome.huggingface, tokens_BS)
    candidate = as_checkpoint(outcome.checkpoint)
    assert candidate is not None, f"{outcome.checkpoint} is not a checkpoint"
    precision = replace(outcome.plan.precision, params="fp32")
    plan = replace(outcome.plan, precision=precision, device="cpu", kernels=KernelConfig())
    mb = MicrobatchContext(tokens=TokenMeta(positions_BS=torch.arange(num_positions)[None]), training=False)
    model = load_model(candidate, plan)
    if outcome.dtype is not None:
        for parameter in model.parameters():
            parameter.copy_(parameter.to(outcome.dtype))
    logits_SV = model.logits(tokens_BS, mb)[:, 0, :vocab_size]
    error, largest = float((logits_SV - expected_SV).abs().max()), float(expected_SV.abs().max())
    num_equal = int((logits_SV.argmax(-1) == expected_SV.argmax(-1)).sum())
    line = (
        f"logits on {num_positions} positions, fp32: largest difference {error:.3g} of {largest:.3g}, "
        f"the most likely token is the same at {num_equal}"
    )
    return line, error <= _RELATIVE_TOLERANCE * largest


def _transformers_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    try:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentProblem("--compare-logits needs the package transformers: pip install transformers") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    except (ValueError, OSError, ImportError, RuntimeError, LookupError, StrictDataclassError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EnvironmentProblem(
            f"--compare-logits: transformers cannot read {folder}: {reason}; the conversion itself is complete"
        ) from error
    return model(tokens_BS).logits[0]


def _parse_size(text: str) -> int:
    """Converts a size such as 5GB, 500MB or 1000 to a number of bytes."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise FlagErrors([Problem(what=f"--shard-size {text} is not a size such as 5GB or 500MB")])
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _parser() -> argparse.ArgumentParser:
    parser = tool_parser(__doc__, allow_abbrev=False)
    parser.add_argument(
        "--load", required=True, help="hf:FOLDER, a checkpoint, or a folder of checkpoints (the newest is used)"
    )
    parser.add_argument("--save", required=True, help="folder for checkpoints, or hf:FOLDER, which must not exist")
    parser.add_argument("--hf-config", type=Path, help="folder whose config.json and tokenizer files are exported")
    size, dtypes = f"{SHARD_BYTES // 10**9}GB", ("keep", "bf16", "fp32")
    parser.add_argument("--shard-size", default=size, help="maximum size of an exported file (%(default)s)")
    parser.add_argument("--dtype", choices=dtypes, default="keep", help="dtype of exported weights (%(default)s)")
    parser.add_argument("--compare-logits", type=positive, metavar="N", help="compare both models on N positions")
    return parser


if __name__ == "__main__":
    run_main(main)
