"""Compares losses of small hybrid models between the CPU in fp32 and the GPU in bf16.

    python benchmarks/harness/bench_hybrid_loss.py [--iterations 300] [--output-dir benchmarks]

Trains a model of each kind, with Mamba-2, gated delta nets, sparse or compressed attention, on the corpus of
`bash scripts/quickstart.sh`: on the CPU in fp32, on the CPU in fp32 with another seed, and on the GPU in bf16 with the
initial weights of the first run. The curves agree if the smoothed loss of the GPU is nearer to that of the CPU than the
run with another seed, on average over the iterations.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import fmean
from types import MappingProxyType

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))  # started as a script, from any folder

from benchmarks.harness.bench_fp8_loss import SETTLED, Curve, PrecisionVariant, read_curve, run_folder  # noqa: E402
from benchmarks.harness.loss_plot import PlottedCurve, draw_losses  # noqa: E402
from benchmarks.harness.loss_runs import add_options, finish, run_together  # noqa: E402
from tools._common import tool_parser  # noqa: E402

COMMON = (
    "--hidden-size 256 --num-attention-heads 4 --group-query-attention --num-query-groups 2 --kv-channels 64 "
    "--num-experts 16 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128 "
    "--normalization RMSNorm --disable-bias-linear --hidden-dropout 0 --attention-dropout 0 --seq-length 256 "
    "--untie-embeddings-and-output-weights --max-position-embeddings 256 --micro-batch-size 4 --global-batch-size 4 "
    "--split 100,0,0 --tokenizer-type SentencePieceTokenizer --vocab-size 4096 --lr 1e-3 --min-lr 1e-4 "
    "--lr-warmup-fraction 0.1 --log-interval 5 --no-plots --use-cpu-initialization --fresh --eval-iters 0"
)
MODELS = MappingProxyType(
    {
        "Nemotron-3-like": "--hybrid-layer-pattern MEM*EME --position-embedding-type none --squared-relu "
        "--mamba-num-groups 2 --mamba-head-dim 32 --mamba-state-dim 64 --moe-latent-size 128 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "Qwen3-Next-like": "--num-layers 4 --position-embedding-type rope --rotary-percent 0.25 --swiglu "
        "--qk-layernorm --experimental-attention-variant gated_delta_net --linear-attention-freq 4 "
        "--linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64 "
        "--attention-output-gate --apply-layernorm-1p --moe-shared-expert-gate",
        "Kimi-Linear-like": "--num-layers 4 --position-embedding-type none --swiglu --multi-latent-attention "
        "--no-group-query-attention --rope-type none --experimental-attention-variant kimi_delta_attention "
        "--linear-attention-freq 4 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
        "--linear-num-key-heads 4 --linear-num-value-heads 4 --linear-key-head-dim 64 --linear-value-head-dim 64 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "DeepSeek-V3.2-like": "--num-layers 4 --position-embedding-type rope --swiglu --multi-latent-attention "
        "--no-group-query-attention --rope-type rope --qk-layernorm --experimental-attention-variant dsa "
        "--q-lora-rank 64 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 32 --v-head-dim 64 "
        "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 --dsa-indexer-topk 64 --dsa-indexer-loss-coeff 0.01 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias",
        "DeepSeek-V4-like": "--num-layers 4 --position-embedding-type rope --swiglu --multi-latent-attention "
        "--no-group-query-attention --rope-type rope --experimental-attention-variant dsv4_hybrid "
        "--csa-compress-ratios ([0,4,16,4]) --csa-window-size 32 --q-lora-rank 64 --v-head-dim 64 "
        "--qk-pos-emb-head-dim 32 --o-groups 2 --o-lora-rank 64 --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 32 "
        "--dsa-indexer-topk 16 --dsa-indexer-loss-coeff 0.01 --enable-hyper-connections --moe-n-hash-layers 1 "
        "--moe-router-score-function sqrtsoftplus --moe-router-enable-expert-bias",
    }
)
REFERENCE, SEED, GPU = (
    PrecisionVariant("CPU, fp32", "--device cpu"),
    PrecisionVariant("CPU, fp32, another seed", "--device cpu --seed 7"),
    PrecisionVariant("GPU, bf16", "--bf16"),
)
COLORS = MappingProxyType({REFERENCE: "C0", SEED: "C7", GPU: "C1"})


def train(options: argparse.Namespace) -> list[str]:
    """Trains all runs at the same time. Returns the last output of each failed run."""
    commands = {}
    for model, flags in MODELS.items():
        for variant in COLORS:
            run = run_folder(options.runs, model, variant)
            words = [*COMMON.split(), *flags.split(), *variant.flags.split(), "--run-dir", str(run)]
            words += ["--train-iters", str(options.iterations), "--data-path", str(options.data_path)]
            words += ["--tokenizer-model", str(options.tokenizer_model)]
            commands[run] = [sys.executable, str(REPOSITORY / "pretrain_moe.py"), *words]
    return run_together(commands)


def mean_gap(curve: Curve, reference: Curve, iterations: int) -> float:
    """Mean absolute difference of the smoothed losses, from `SETTLED` to the end."""
    common = [each for each in curve.losses if each in reference.losses and each >= SETTLED * iterations]
    return fmean(abs(curve.losses[each] - reference.losses[each]) for each in common)


def report(curves: Mapping[str, Mapping[PrecisionVariant, Curve]], picture: str, machine: str, iterations: int) -> str:
    lines = [
        f"# Losses of hybrid models on the CPU and on one {machine}",
        "",
        f"{date.today()}, torch {torch.__version__}, `python benchmarks/harness/bench_hybrid_loss.py --iterations",
        f"{iterations}`. Small models on the sources of the Python standard library, smoothed losses. Gaps are means",
        "of absolute differences to the CPU in fp32 with the same seed, in nats.",
        "",
        "| model | last loss, CPU fp32 | GPU bf16 | gap of the GPU | gap of another seed | agree |",
        "|---|---|---|---|---|---|",
    ]
    for model, own in curves.items():
        gap, spread = (mean_gap(own[each], own[REFERENCE], iterations) for each in (GPU, SEED))
        last = (f"{own[each].losses[max(own[each].losses)]:.4f}" for each in (REFERENCE, GPU))
        cells = (model, *last, f"{gap:.4f}", f"{spread:.4f}", "yes" if gap <= spread else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"![loss curves]({picture})"]) + "\n"


def plotted(own: Mapping[PrecisionVariant, Curve]) -> list[PlottedCurve]:
    base = own[REFERENCE].losses
    return [
        PlottedCurve(
            variant.name,
            COLORS[variant],
            curve.losses,
            {} if variant is REFERENCE else {at: loss - base[at] for at, loss in curve.losses.items() if at in base},
        )
        for variant, curve in own.items()
    ]


def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    add_options(parser, "bench_hybrid_loss", iterations=300)
    options = parser.parse_args(argv)
    failures = train(options)
    curves: dict[str, dict[PrecisionVariant, Curve]] = {}
    for model in MODELS:
        found = {
            each: read_curve(model, each, run_folder(options.runs, model, each), options.iterations) for each in COLORS
        }
        complete = {variant: curve for variant, curve in found.items() if curve is not None}
        if len(complete) == len(COLORS):
            curves[model] = complete
    machine = torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0]
    stem = f"{date.today()}-{machine.lower()}-hybrid-loss"
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if curves:
        columns = {model: plotted(own) for model, own in curves.items()}
        picture = options.output_dir / f"{stem}.png"
        draw_losses(columns, picture, loss="smoothed loss per token (nats)", difference="minus CPU in fp32 (nats)")
    text = report(curves, f"{stem}.png", machine, options.iterations)
    return finish(options.output_dir / f"{stem}.md", text, failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
