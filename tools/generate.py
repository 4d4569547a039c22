"""Samples text from a trained model: `python tools/generate.py --load runs/quickstart/checkpoints --prompt "def "`.

Model, tokenizer and precision come from the checkpoint's run.yaml, or from the folder of `--load hf:FOLDER`. Relative
paths of run.yaml are looked up in the current folder and in those above the checkpoint. Generation uses no KV cache:
every new token costs a forward of the whole text.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # started as a script, from any folder
if __name__ == "__main__" and sys.stderr.isatty():
    print("loading torch", file=sys.stderr, flush=True)

import torch
from torch import Tensor

from megatron_moe.api import LanguageModel, plan_of_checkpoint
from megatron_moe.checkpoint.directory import Candidate, find_checkpoints
from megatron_moe.config.checkpoint import HUGGING_FACE
from megatron_moe.config.exit_codes import ExitCode
from megatron_moe.config.run import RunPlan
from megatron_moe.data.batch import MicrobatchContext, TokenMeta
from megatron_moe.data.tokenizer import Tokenizer, load_tokenizer
from megatron_moe.model.gpt import GPT
from megatron_moe.parallel import rng
from tools._common import reports_errors, run_main, tool_parser


def load_model(candidate: Candidate, plan: RunPlan) -> GPT:
    """Builds the model in evaluation mode and loads the checkpoint's weights after verifying their checksums."""
    loaded = LanguageModel(plan, initial=False)
    loaded.read_weights(candidate)
    return loaded.model.eval()


@torch.no_grad()
def continue_text(model: GPT, tokenizer: Tokenizer, prompt: Sequence[int], options: argparse.Namespace) -> list[int]:
    """Returns the token ids of the prompt, followed by up to `options.max_new_tokens` new ids.

    Generation ends before the first end-of-document id, which is not returned. Each new id depends on at most the last
    `max_positions` ids. It is in the tokenizer's vocabulary; larger ids are padding of the embedding table.
    """
    device = next(model.parameters()).device
    ids = list(prompt)
    for step in range(options.max_new_tokens):
        window = torch.tensor([ids[-model.config.max_positions :]], device=device)
        mb = MicrobatchContext(
            tokens=TokenMeta(positions_BS=torch.arange(window.shape[1], device=device)[None]), training=False
        )
        logits_V = model.logits(window, mb)[-1, 0, : tokenizer.vocab_size].double().cpu()
        chosen = sample_token(logits_V, options.temperature, options.top_k, (options.seed, "generate", step))
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
    return ids


def sample_token(logits_V: Tensor, temperature: float, top_k: int, key: rng.Key) -> int:
    """Returns the most likely id if `temperature` is 0, else an id sampled from the `top_k` most likely ids."""
    if temperature == 0.0:
        return int(logits_V.argmax())
    best, ids = torch.topk(logits_V, min(top_k, len(logits_V)))
    probabilities = torch.softmax((best - best[0]) / temperature, dim=0)  # no quotient overflows: at most 0
    return int(ids[torch.multinomial(probabilities, 1, generator=rng.generator(key))])


@reports_errors
def main(argv: Sequence[str]) -> int:
    parser = tool_parser(__doc__)
    parser.add_argument(
        "--load", required=True, help="checkpoint, folder of checkpoints (the newest is used), or hf:FOLDER"
    )
    parser.add_argument("--prompt", default="", help="text to continue; if empty, starts a new document")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.8, help="0: greedy")
    parser.add_argument("--top-k", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    options = parser.parse_args(argv)
    if not 0 <= options.temperature < inf:
        parser.error(f"--temperature {options.temperature:g} must be at least 0")
    if options.top_k < 1 or options.max_new_tokens < 0:
        parser.error("--top-k must be at least 1, --max-new-tokens at least 0")
    if options.load.startswith(HUGGING_FACE):
        loaded = LanguageModel.load(options.load, device=options.device)
        path, model, plan = options.load, loaded.model.eval(), loaded.plan
    else:
        candidate = find_checkpoints(Path(options.load))[0]
        path, plan = str(candidate.path), plan_of_checkpoint(candidate, ["--device", options.device])
        model = load_model(candidate, plan)
    tokenizer = load_tokenizer(plan.data.tokenizer)
    prompt = tokenizer.encode(options.prompt) or [tokenizer.eod]
    ids = continue_text(model, tokenizer, prompt, options)
    print(f"--- {path}, {len(ids) - len(prompt)} new tokens, temperature {options.temperature:g}{os.linesep}")
    print(tokenizer.decode(ids))
    return ExitCode.OK


if __name__ == "__main__":
    run_main(main)
