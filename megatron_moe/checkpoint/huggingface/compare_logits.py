"""Compares the logits of a converted model with those of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_moe.checkpoint.huggingface.folder import read_config
from megatron_moe.config.exit_codes import EnvironmentProblem
from megatron_moe.data.batch import MicrobatchContext, TokenMeta

_RELATIVE_TOLERANCE = 1e-4
"""Relative to the largest logit: above fp32 rounding of dozens of layers, below the effect of a wrong weight."""


@torch.no_grad()
def compare_logits(folder: Path, load_model: Callable[[], Any], num_positions: int) -> tuple[str, bool]:
    """Runs the transformers model of `folder` and our model on the same random tokens, both in fp32.

    The models are loaded one after the other; `load_model` returns one with the method `GPT.logits`.

    Returns:
        A sentence with the largest difference, and whether it is within tolerance.
    Raises:
        EnvironmentProblem: transformers is not installed or cannot load the folder.
    """
    vocab_size = int(read_config(folder)["vocab_size"])
    tokens_BS = torch.randint(0, vocab_size, (1, num_positions), generator=torch.Generator().manual_seed(1))
    expected_SV = _transformers_logits(folder, tokens_BS)
    mb = MicrobatchContext(tokens=TokenMeta(positions_BS=torch.arange(num_positions)[None]), training=False)
    logits_SV = load_model().logits(tokens_BS, mb)[:, 0, :vocab_size]
    error, largest = float((logits_SV - expected_SV).abs().max()), float(expected_SV.abs().max())
    num_equal = int((logits_SV.argmax(-1) == expected_SV.argmax(-1)).sum())
    line = (
        f"logits on {num_positions} positions, fp32: largest difference {error:.3g} of {largest:.3g}, "
        f"the most likely token is the same at {num_equal}"
    )
    return line, error <= _RELATIVE_TOLERANCE * largest


def _transformers_logits(folder: Path, tokens_BS: Tensor) -> Tensor:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentProblem("--compare-logits needs the package transformers: pip install transformers") from error
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
    except (ValueError, OSError, ImportError, RuntimeError, LookupError) as error:
        reason = str(error).strip().split("\n")[0]
        raise EnvironmentProblem(
            f"--compare-logits: transformers cannot read {folder}: {reason}; the conversion itself is complete"
        ) from error
    logits_SV: Tensor = model(tokens_BS).logits[0]
    return logits_SV
