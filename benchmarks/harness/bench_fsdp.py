"""Times a dense layer stack under torch FSDP2, for comparison with `profile_step.py` of the same shape.

    torchrun --nproc-per-node 2 benchmarks/harness/bench_fsdp.py --layers 16 --hidden 4096 --ffn 14336 --heads 32

The stack has RMSNorm, causal attention (torch's scaled_dot_product_attention), SwiGLU, an embedding and an output
layer, bf16 weights for compute, fp32 master weights and fused AdamW. Rank 0 prints the median step time, TFLOP/s per
GPU by Megatron's formula, and peak memory.
"""

import argparse
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # started as a script, from any folder


class Layer(nn.Module):
    """Transformer layer without biases."""

    def __init__(self, hidden: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.fc1, self.fc2 = nn.Linear(hidden, 2 * ffn, bias=False), nn.Linear(ffn, hidden, bias=False)

    def forward(self, x_BSH: Tensor) -> Tensor:
        batch, length, hidden = x_BSH.shape
        qkv = self.qkv(self.norms[0](x_BSH)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x_BSH = x_BSH + self.proj(out.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.fc1(self.norms[1](x_BSH)).chunk(2, dim=-1)
        return x_BSH + self.fc2(F.silu(gate) * up)


class Stack(nn.Module):
    """Embedding, layers and output layer; returns the mean loss."""

    def __init__(self, layers: int, hidden: int, ffn: int, heads: int, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, ffn, heads) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSH = self.embedding(tokens_BS)
        for layer in self.layers:
            x_BSH = layer(x_BSH)
        logits = self.head(self.norm(x_BSH))
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens_BS.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("layers", 16), ("hidden", 4096), ("ffn", 14336), ("heads", 32), ("vocab", 32000), ("seq", 4096),
        ("micro-batch-size", 1), ("microbatches", 4), ("warmup", 3), ("steps", 8),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(1)
    with torch.device("cuda"):
        stack = Stack(options.layers, options.hidden, options.ffn, options.heads, options.vocab)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in stack.layers:
        layer.compile()
        fully_shard(layer, mp_policy=policy)
    fully_shard(stack, mp_policy=policy)
    optimizer = torch.optim.AdamW(stack.parameters(), lr=1e-5, fused=True)
    tokens = torch.randint(options.vocab, (options.micro_batch_size, options.seq), device="cuda")
    times = []
    for step in range(options.warmup + options.steps):
        if step == options.warmup:
            torch.cuda.reset_peak_memory_stats()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(options.microbatches):
            (stack(tokens) / options.microbatches).backward()
        torch.nn.utils.clip_grad_norm_(stack.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    times = sorted(times[options.warmup :])
    median = times[len(times) // 2]
    num_tokens = options.microbatches * options.micro_batch_size * options.seq
    weights = options.layers * (4 * options.hidden + 3 * options.ffn) * options.hidden + options.vocab * options.hidden
    attention = options.layers * 2 * options.hidden * options.seq  # causal: half of the scores
    tflops = 3 * (2 * weights + attention) * num_tokens / median / 1e9
    if dist.get_rank() == 0:
        peak = torch.cuda.max_memory_allocated() / 2**20
        print(f"torch FSDP2: step {median:.1f} ms ({times[0]:.1f} to {times[-1]:.1f}), {tflops:.1f} TFLOP/s/GPU, "
              f"peak {peak:,.0f} MiB")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
