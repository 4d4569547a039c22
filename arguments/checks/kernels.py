"""Sizes of matrices that GPUs compute slowly. They are legal, so they are noted, at the start and by --dry-run.

The matrix units of GPUs since Hopper are fed by loads whose rows start at multiples of 16 bytes, which are 8 numbers of
bf16 or fp16. Where rows start elsewhere, cuBLAS takes kernels made for older GPUs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from arguments.flags import Flags
from megatron_moe.config.attention import AttentionConfig, MLAConfig
from megatron_moe.config.moe import MoEConfig
from megatron_moe.config.run import RunPlan

MULTIPLE = 8
_PADDING = 128


@dataclass(frozen=True)
class Size:
    """A size of the model that sets the width of matrices."""

    flag: str
    whole: int
    ranks: int = 1
    """It is shared by so many."""

    @property
    def fits(self) -> bool:
        return self.whole % (MULTIPLE * self.ranks) == 0

    def __str__(self) -> str:
        shared = f" ({self.whole // self.ranks} on each of {self.ranks} ranks)" if self.ranks > 1 else ""
        return f"{self.flag} {self.whole}{shared}"


def slow_sizes(flags: Flags, plan: RunPlan) -> Iterator[str]:
    """What there is to say of them; nothing of runs on CPUs, or in formats that do not need the matrix units."""
    number = plan.precision.params
    if number not in ("bf16", "fp16") or plan.device == "cpu":
        return
    rows = plan.model.vocab_size // plan.parallel.tp
    if rows % MULTIPLE:
        yield (
            f"the head has {rows:,} rows on a rank, no multiple of {MULTIPLE}: on GPUs its {number} products leave the "
            "fast kernels (with 151,935 rows instead of 151,936 a step of Q6 on one H200 took 755 ms instead of 361); "
            f"{_padding(flags, plan)}"
        )
    slow = [size for size in dict.fromkeys(_sizes(plan)) if not size.fits]
    if slow:
        yield (
            f"no multiple of {MULTIPLE}{' on a rank' if any(size.ranks > 1 for size in slow) else ''}: "
            f"{', '.join(map(str, slow))}; on GPUs {number} products of such sizes leave the fast kernels, and torch's "
            "grouped products of experts refuse them"
        )


def _padding(flags: Flags, plan: RunPlan) -> str:
    """What would mend the vocabulary."""
    unit = _PADDING * plan.parallel.tp
    if flags.model.padded_vocab_size is not None:
        return f"--padded-vocab-size {-(-plan.model.vocab_size // unit) * unit} mends that"
    without = "" if flags.model.pad_vocab_size else ", without --disable-pad-vocab-size,"
    return f"--make-vocab-size-divisible-by {_PADDING}{without} mends that"


def _sizes(plan: RunPlan) -> Iterator[Size]:
    """Of the model's layers, in the order in which a token meets them."""
    tp = plan.parallel.tp
    yield Size("--hidden-size", plan.model.hidden_size)
    for layer in plan.model.layers:
        yield from _of_mixer(layer.mixer)
        if isinstance(layer.feed_forward, MoEConfig):
            yield from _of_experts(layer.feed_forward, plan)
        else:
            yield Size("--ffn-hidden-size", layer.feed_forward.ffn_hidden_size, tp)


def _of_mixer(mixer: AttentionConfig | MLAConfig) -> Iterator[Size]:
    """Heads are whole on every rank, and so are latents."""
    if isinstance(mixer, AttentionConfig):
        yield Size("--kv-channels", mixer.head_dim)
        return
    if mixer.q_lora_rank is not None:
        yield Size("--q-lora-rank", mixer.q_lora_rank)
    yield Size("--kv-lora-rank", mixer.kv_lora_rank)
    yield Size("--qk-head-dim", mixer.qk_head_dim)
    yield Size("--qk-pos-emb-head-dim", mixer.qk_rope_dim)
    yield Size("--v-head-dim", mixer.v_head_dim)


def _of_experts(moe: MoEConfig, plan: RunPlan) -> Iterator[Size]:
    if moe.latent_size is not None:
        yield Size("--moe-latent-size", moe.latent_size)
    yield Size("--moe-ffn-hidden-size", moe.experts.ffn_hidden_size, plan.parallel.etp)
    if moe.shared is not None:
        yield Size("--moe-shared-expert-intermediate-size", moe.shared.mlp.ffn_hidden_size, plan.parallel.tp)
