"""Converts between Hugging Face folders and checkpoints of this program, on a CPU, in the memory of one tensor.

    python tools/convert_checkpoint.py --load hf:models/Qwen3-30B-A3B --save checkpoints/qwen3
    python tools/convert_checkpoint.py --load runs/my/checkpoints --save hf:exports/my --hf-config models/Qwen3-30B-A3B

Start from the first with `--pretrained-checkpoint checkpoints/qwen3`. All other words are flags of pretrain_moe.py and
win over config.json (to ours), or over the run that wrote the checkpoint (to Hugging Face). conversion.md beside the
result lists every tensor. Exit code 0: done; 12: --compare-logits found a difference.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script, from any folder

from arguments.errors import Finished, FlagErrors, Problem  # noqa: E402
from arguments.flags import Registry  # noqa: E402
from arguments.huggingface import published_flags  # noqa: E402
from arguments.read import read_plan  # noqa: E402
from megatron_moe.checkpoint.directory import as_checkpoint  # noqa: E402
from megatron_moe.checkpoint.huggingface.convert import (  # noqa: E402
    ConversionReport,
    from_hf,
    to_hf,
)
from megatron_moe.checkpoint.huggingface.export import SHARD_BYTES  # noqa: E402
from megatron_moe.checkpoint.huggingface.folder import (  # noqa: E402
    CONFIG,
    prediction_layers,
    read_config,
    weights_dtype,
)
from megatron_moe.checkpoint.load import HUGGING_FACE  # noqa: E402
from megatron_moe.config.exit_codes import (  # noqa: E402
    CheckpointProblem,
    EnvironmentProblem,
    ExitCode,
    RunError,
)
from megatron_moe.config.run import KernelConfig, RunPlan  # noqa: E402
from megatron_moe.cost_model.parameters import count_parameters  # noqa: E402
from megatron_moe.data.batch import MicrobatchContext, TokenMeta  # noqa: E402
from megatron_moe.data.tokenizer import local_copy, vocab_size_of  # noqa: E402
from megatron_moe.kernels.reference import bundle  # noqa: E402
from megatron_moe.model.gpt import GPT  # noqa: E402
from megatron_moe.parallel.context import ParallelContext, torch_dtype  # noqa: E402
from megatron_moe.train.train_state import TrainState  # noqa: E402
from tools._common import positive, run_main  # noqa: E402
from tools.generate import load_model, newest, plan_of  # noqa: E402

REPORT = "conversion.md"
_UNITS = (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))
_LONGEST = 4096
_MAX_PARAMETERS_PER_BYTE = 16
"""More than any element type, padding or tied weights explain."""
_SAME_LOGITS = 1e-4
"""Of the largest logit: what single precision leaves after some dozens of layers, and no mistake does."""


@dataclass(frozen=True)
class Outcome:
    """A finished conversion."""

    report: ConversionReport
    beside: Path
    """Folder for the report."""
    huggingface: Path
    ours: Path
    """Checkpoint."""
    plan: RunPlan


def main(argv: Sequence[str]) -> int:
    options, words = _parser().parse_known_args(argv)
    try:
        return int(_convert(options, words))
    except Finished as answer:
        print(answer.text)
        return int(answer.code)
    except FlagErrors as problems:
        print(problems.report(), file=sys.stderr)
        return int(ExitCode.CONFIG)
    except RunError as problem:
        print(problem, file=sys.stderr)
        return int(problem.code)


def _convert(options: argparse.Namespace, words: Sequence[str]) -> ExitCode:
    load, save = options.load, options.save
    if load.startswith(HUGGING_FACE) == save.startswith(HUGGING_FACE):
        what = f"one of --load {load} and --save {save} must be hf:FOLDER, the other a folder of checkpoints"
        raise FlagErrors([Problem(what=what)])
    outcome = _to_ours(options, words) if load.startswith(HUGGING_FACE) else _to_hugging_face(options, words)
    code = ExitCode.OK
    try:
        if options.compare_logits:
            line, same = compared_logits(outcome, options.compare_logits)
            outcome.report.notes.append(line)
            code = ExitCode.OK if same else ExitCode.DRIFT
    finally:  # the conversion is done even if it cannot be compared
        (outcome.beside / REPORT).write_text(outcome.report.text(), encoding="utf-8")
    for note in outcome.report.notes:
        print(note)
    rows, seconds = len(outcome.report.rows), outcome.report.seconds
    print(f"{outcome.report.source} -> {outcome.report.target}: {rows} tensors in {seconds:.1f} s; see {REPORT}")
    return code


def _to_ours(options: argparse.Namespace, words: Sequence[str]) -> Outcome:
    folder, save = Path(options.load.removeprefix(HUGGING_FACE)), Path(options.save)
    plan = read_plan([*_flags_for(folder), *words], {}, vocab_size_of=vocab_size_of)
    report = from_hf(
        folder,
        save,
        skeleton(plan, folder),
        plan.model,
        TrainState().to_json(plan),
        {"run.yaml": plan.resolved_yaml},
    )
    return Outcome(report, save, folder, report.target, plan)


def _flags_for(folder: Path) -> list[str]:
    """Flags of a run on the model of a folder; those of the training are there because some must be given."""
    config = read_config(folder)
    length = config.get("max_position_embeddings", _LONGEST)
    if not isinstance(length, int):
        raise CheckpointProblem(f"{folder / CONFIG}: max_position_embeddings is {length!r}, which is no whole number")
    length = min(length, _LONGEST)
    published_flags(str(folder), Registry.declared())  # names an unknown family before its weights are looked for
    flags = ["--from-hf-config", str(folder), "--seq-length", str(length), "--micro-batch-size", "1", "--mock-data"]
    flags += ["--train-iters", "1", "--lr", "1e-5"]
    flags += ["--bf16"] if weights_dtype(folder, config) == "BF16" else []
    flags += [] if prediction_layers(folder, config) else ["--mtp-num-layers", "0"]
    flags += ["--skip-train"] if config.get("num_experts_per_tok") == 1 else []  # its router may have no gradient
    if (folder / "tokenizer.json").is_file():
        return [*flags, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
    return [*flags, "--tokenizer-type", "NullTokenizer"]


def _to_hugging_face(options: argparse.Namespace, words: Sequence[str]) -> Outcome:
    output = Path(options.save.removeprefix(HUGGING_FACE))
    candidate = newest(Path(options.load))
    plan = plan_of(candidate, "cpu", words)
    dtype = None if options.dtype == "keep" else torch_dtype(options.dtype)
    template = options.hf_config or _template(plan)
    shard_bytes = _bytes(options.shard_size)
    report = to_hf(
        candidate.path,
        output,
        skeleton(plan, candidate.path),
        plan.model,
        template,
        dtype=dtype,
        shard_bytes=shard_bytes,
    )
    return Outcome(report, output, output, candidate.path, plan)


def skeleton(plan: RunPlan, folder: Path) -> GPT:
    """The whole model without values, in the element types of the run.

    Raises CheckpointProblem for a model that is far too large for the files of `folder`, before it is built.
    """
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    num_parameters = count_parameters(plan.model).total
    if num_parameters > _MAX_PARAMETERS_PER_BYTE * num_bytes:
        raise CheckpointProblem(
            f"the flags and config.json describe a model of {num_parameters:,} parameters, but {folder} holds "
            f"{num_bytes:,} bytes; correct the sizes of the model"
        )
    context = ParallelContext.single(dtype=torch_dtype(plan.precision.params), device="meta")
    return GPT(plan.model, context, bundle())


def _template(plan: RunPlan) -> Path:
    """Of a run that began with a Hugging Face folder, or takes its tokenizer from one: that folder."""
    asked = (plan.checkpoint.load, plan.checkpoint.pretrained)
    folders = [Path(place.removeprefix(HUGGING_FACE)) for place in asked if place and place.startswith(HUGGING_FACE)]
    if plan.data.tokenizer.model is not None:
        folders.append(local_copy(plan.data.tokenizer.model))
    found = next((folder for folder in folders if (folder / CONFIG).is_file()), None)
    if found is None:
        raise CheckpointProblem(
            "the checkpoint does not tell which config.json describes its model; give --hf-config FOLDER, where "
            "config.json and the tokenizer files lie"
        )
    return found


@torch.no_grad()
def compared_logits(outcome: Outcome, num_positions: int) -> tuple[str, bool]:
    """Both models on the same random tokens, in single precision: a sentence, and whether they are the same.

    Needs the package transformers, and memory for both models.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentProblem("--compare-logits needs the package transformers: pip install transformers") from error
    vocab = int(read_config(outcome.huggingface)["vocab_size"])
    tokens_BS = torch.randint(0, vocab, (1, num_positions), generator=torch.Generator().manual_seed(1))
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            outcome.huggingface, dtype=torch.float32, experts_implementation="eager"
        ).eval()
    except (ValueError, OSError, ImportError, RuntimeError, LookupError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EnvironmentProblem(
            f"--compare-logits: transformers cannot read {outcome.huggingface}: {reason}; all else is done"
        ) from error
    theirs_SV = theirs(tokens_BS).logits[0]
    del theirs
    candidate = as_checkpoint(outcome.ours)
    assert candidate is not None, f"{outcome.ours} is no checkpoint"
    precision = replace(outcome.plan.precision, params="fp32")
    wide = replace(outcome.plan, precision=precision, device="cpu", kernels=KernelConfig())
    model = load_model(candidate, wide)
    mb = MicrobatchContext(tokens=TokenMeta(positions_BS=torch.arange(num_positions)[None]), training=False)
    ours_SV = model.logits(tokens_BS, mb)[:, 0, :vocab]
    return _difference(ours_SV, theirs_SV)


def _difference(ours_SV: Tensor, theirs_SV: Tensor) -> tuple[str, bool]:
    error, largest = float((ours_SV - theirs_SV).abs().max()), float(theirs_SV.abs().max())
    agree = int((ours_SV.argmax(-1) == theirs_SV.argmax(-1)).sum())
    line = (
        f"logits on {len(ours_SV)} positions, fp32: largest difference {error:.3g} of {largest:.3g}, "
        f"the likeliest token is the same at {agree}"
    )
    return line, error <= _SAME_LOGITS * largest


def _bytes(text: str) -> int:
    """5GB, 500MB, 1000."""
    for unit, factor in _UNITS:
        number = text.upper().removesuffix(unit)
        if text.upper().endswith(unit) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise FlagErrors([Problem(what=f"--shard-size {text} is not a size such as 5GB or 500MB")])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--load", required=True, help="hf:FOLDER, or a checkpoint, or a folder of them (the newest)")
    parser.add_argument("--save", required=True, help="folder for checkpoints, or hf:FOLDER, which must not exist")
    parser.add_argument("--hf-config", type=Path, help="folder with the config.json and the tokenizer of the export")
    parser.add_argument("--shard-size", default=f"{SHARD_BYTES // 10**9}GB", help="of one exported file (5GB)")
    parser.add_argument("--dtype", choices=("keep", "bf16", "fp32"), default="keep", help="of exported weights (keep)")
    parser.add_argument("--compare-logits", type=positive, metavar="N", help="compare both models on N positions")
    return parser


if __name__ == "__main__":
    run_main(main)
