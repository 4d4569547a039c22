"""Import of checkpoints written by Megatron-Core, and rejection of damaged or malicious ones.

The checkpoints in tests/data_files/megatron were written by Megatron-Core (make.py there).
"""

import io
import os
import pickle
import shutil
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor

from megatron_moe.api import plan_of_checkpoint
from megatron_moe.checkpoint.directory import find_checkpoints
from megatron_moe.checkpoint.megatron import source
from megatron_moe.checkpoint.megatron.fsdp_dtensor import FSDPDTensor
from megatron_moe.checkpoint.megatron.per_rank import PerRank
from megatron_moe.checkpoint.megatron.pickles import Inert, load_archive, load_pickle
from megatron_moe.config.exit_codes import CheckpointProblem, ExitCode
from megatron_moe.data.batch import MicrobatchContext, TokenMeta
from tests.helpers.checkpoint_files import stored_tensors
from tests.helpers.tolerances import BF16_RUN, EXACT
from tools import import_megatron
from tools.generate import load_model

FILES = Path(__file__).parents[1] / "data_files" / "megatron"
COMMON = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --ffn-hidden-size 24 --num-experts 4 --moe-router-topk 2 "
    "--moe-ffn-hidden-size 8 --moe-shared-expert-intermediate-size 8 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6 "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --seq-length 16 --max-position-embeddings 16 "
    "--micro-batch-size 1 --global-batch-size 2 --mock-data --train-iters 5 --lr 1e-3 --tokenizer-type NullTokenizer "
    "--vocab-size 64 --make-vocab-size-divisible-by 1 --bf16 --rotary-base 10000 --device cpu"
)
GROUPED = "--group-query-attention --num-query-groups 2 --kv-channels 8"
MODELS = {
    "gqa": f"{COMMON} {GROUPED} --qk-layernorm --moe-layer-freq [0,1]",
    "alike": f"{COMMON} {GROUPED}",
    "mla": f"{COMMON} --multi-latent-attention --q-lora-rank 8 --kv-lora-rank 16 --qk-head-dim 8 --v-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --qk-layernorm --mtp-num-layers 1 --moe-layer-freq [0,1]",
    "v4": f"{COMMON} --mtp-num-layers 1 --multi-latent-attention --rope-type rope --q-lora-rank 8 --v-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --experimental-attention-variant dsv4_hybrid --csa-compress-ratios [4,8,0] --o-groups 2 "
    "--o-lora-rank 8 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 --dsa-indexer-topk 2 --enable-hyper-connections "
    "--num-residual-streams 3 --moe-n-hash-layers 1 --attention-dropout 0 --hidden-dropout 0",
}
KEPT = (("0.16.1", "gqa"), ("0.19.2", "gqa"), ("0.19.2", "alike"), ("0.19.2", "mla"), ("0.19.2-fsdp", "gqa"))


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one subfolder per Megatron version and model."""
    root = tmp_path_factory.mktemp("megatron")
    for archive in FILES.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            # archives of this repository are trusted; Python before 3.11.4 cannot filter untrusted ones
            tar.extraction_filter = getattr(tarfile, "data_filter", None)
            tar.extractall(root / archive.name.removesuffix(".tar.xz").removeprefix("megatron-core-"))
    return root


def imported(folder: Path, save: Path, model: str, *more: str, flags: str = "") -> dict[str, Tensor]:
    """The tensors of the checkpoint that the tool writes."""
    words = ["--load", str(folder), "--save", str(save), *more, "--", *MODELS[model].split(), *flags.split()]
    assert import_megatron.main(words) == ExitCode.OK
    (path,) = save.glob("iter_*")
    return stored_tensors(path)


def refused(folder: Path, tmp_path: Path, *more: str, model: str = MODELS["gqa"]) -> int:
    """Exit code of an import that writes nothing."""
    words = ["--load", str(folder), "--save", str(tmp_path / "ours"), *more]
    code = import_megatron.main([*words, "--", *model.split()])
    assert not any(tmp_path.glob("ours/iter_*"))
    return code


def copy_of(kept: Path, tmp_path: Path, model: str = "0.16.1/gqa") -> Path:
    return Path(shutil.copytree(kept / model / "iter_0000003", tmp_path / "ckpt"))


def save_rank(folder: Path, content: object, name: str = "mp_rank_00") -> None:
    (folder / name).mkdir(parents=True)
    torch.save(content, folder / name / "model_optim_rng.pt")


def whole_weights(kept: Path, tmp_path: Path, model: str = "gqa") -> dict[str, Tensor]:
    """Weights of an imported checkpoint by parameter name."""
    found = imported(kept / "0.19.2" / model, tmp_path / "whole", model, "--no-optimizer")
    return {key.removeprefix("model."): value for key, value in found.items()}


@pytest.mark.parametrize("version, model", KEPT)
def test_weights_are_megatrons_and_give_its_logits(version: str, model: str, kept: Path, tmp_path: Path) -> None:
    tensors = imported(kept / version / model, tmp_path / "ours", model)
    truth = load_file(kept / version / model / "truth.safetensors")
    common = [key for key in truth if key in tensors]
    assert len(common) > 10
    for key in common:
        EXACT.check(tensors[key].float(), truth[key].float(), key)
    candidate = find_checkpoints(tmp_path / "ours")[0]
    network = load_model(candidate, plan_of_checkpoint(candidate, ["--device", "cpu"]))
    tokens_BS = truth["tokens"]
    meta = TokenMeta(positions_BS=torch.arange(tokens_BS.shape[1]).expand_as(tokens_BS))
    with torch.no_grad():
        logits_BSV = network.logits(tokens_BS, MicrobatchContext(tokens=meta, training=False)).transpose(0, 1).float()
    errors_BS = (logits_BSV - truth["logits"]).norm(dim=-1) / truth["logits"].norm(dim=-1)
    # both run in bf16, so a few tokens select other experts; the median over positions is compared
    assert errors_BS.median() < BF16_RUN.rtol, f"relative errors {errors_BS}"


@pytest.mark.parametrize("version, model", KEPT)
def test_optimizer_state_is_imported(version: str, model: str, kept: Path, tmp_path: Path) -> None:
    tensors = imported(kept / version / model, tmp_path / "ours", model)
    assert tensors["optimizer.step_count"] == 3
    trained = [key.removeprefix("model.") for key in tensors if key.startswith("model.") and "expert_bias" not in key]
    for name in trained:
        EXACT.check(tensors[f"master.{name}"].bfloat16().float(), tensors[f"model.{name}"].float(), name)
        assert tensors[f"exp_avg_sq.{name}"].ge(0).all() and tensors[f"exp_avg.{name}"].dtype is torch.float32
    moved = [name for name in trained if tensors[f"exp_avg_sq.{name}"].gt(0).any()]
    assert len(moved) > 0.9 * len(trained), f"moments are zero but for {moved}"


def test_a_run_continues_from_an_imported_checkpoint(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import pretrain_moe

    imported(kept / "0.19.2" / "gqa", tmp_path / "ours", "gqa")
    words = [*MODELS["gqa"].split(), "--load", str(tmp_path / "ours"), "--log-interval", "1"]
    assert pretrain_moe.main([*words, "--run-dir", str(tmp_path / "run")], {}) == ExitCode.OK
    log = (tmp_path / "run" / "log.txt").read_text()
    assert " 4/" in log and " 5/" in log and " 3/" not in log, log[-2000:]


def test_fp32_runs_import_master_weights_as_weights(kept: Path, tmp_path: Path) -> None:
    import pretrain_moe

    narrow = imported(kept / "0.19.2" / "gqa", tmp_path / "narrow", "gqa")
    wide = imported(kept / "0.19.2" / "gqa", tmp_path / "wide", "gqa", flags="--no-bf16")
    trained = [key.removeprefix("master.") for key in narrow if key.startswith("master.")]
    for name in trained:
        EXACT.check(wide[f"model.{name}"], narrow[f"master.{name}"], name)
    assert not any(key.startswith("master.") for key in wide)
    words = [*MODELS["gqa"].split(), "--no-bf16", "--load", str(tmp_path / "wide")]
    assert pretrain_moe.main([*words, "--run-dir", str(tmp_path / "run")], {}) == ExitCode.OK


def test_flags_of_a_parallel_run_are_imported_on_one_rank(kept: Path, tmp_path: Path) -> None:
    layout = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    layout += "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall"
    alone = imported(kept / "0.19.2" / "alike", tmp_path / "alone", "alike")
    found = imported(kept / "0.19.2" / "alike", tmp_path / "ours", "alike", flags=layout)
    assert set(found) == set(alone)
    candidate = find_checkpoints(tmp_path / "ours")[0]
    assert plan_of_checkpoint(candidate, ["--device", "cpu"]).parallel.world_size == 1, (
        "and what is written can be looked into"
    )


def test_fp32_weights_of_a_virtual_pipeline_are_imported_exactly(tmp_path: Path) -> None:
    """Per-rank checkpoint of a virtual pipeline of eleven chunks on one rank."""
    flags = "--num-layers 11 --moe-layer-freq 1 --no-bf16"
    words = [*MODELS["alike"].split(), *flags.split()]
    shapes = import_megatron.build_meta_model(import_megatron.plan_of_run(words), FILES).state_dict()
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(like.shape, generator=generator) for name, like in shapes.items()}
    chunks: dict[str, dict[str, Tensor]] = {f"model{chunk}": {} for chunk in range(11)}
    for name, value in weights.items():
        layer = int(name.split(".")[2]) if name.startswith("decoder.layers.") else 10 * (not name.startswith("emb"))
        parts = {name.replace(f"layers.{layer}.", "layers.0."): value}
        if ".mlp.experts." in name:
            head, matrix, _ = next(iter(parts)).rsplit(".", 2)
            parts = {f"{head}.{matrix}.weight{expert}": value[expert].clone() for expert in range(4)}
        chunks[f"model{layer}"] |= parts
    args = Namespace(swiglu=True, virtual_pipeline_model_parallel_size=11)
    save_rank(tmp_path / "ranks", {**chunks, "args": args, "iteration": 3})
    found = imported(tmp_path / "ranks", tmp_path / "ours", "alike", "--no-optimizer", flags=flags)
    assert set(found) == {f"model.{name}" for name in weights}
    for name, value in weights.items():
        EXACT.check(found[f"model.{name}"], value, name)


V4_NAMES = (
    ("streams_head.mapping_proj.weight", "hc_head_fn"),
    ("streams_head.scale", "hc_head_scale"),
    ("streams_head.bias", "hc_head_base"),
    ("transformer_layer.", "mtp_model_layer."),
    ("self_attention.sinks", "self_attention.core_attention.attn_sink"),
    ("self_attention.compressor.", "self_attention.core_attention.compressor."),
    ("self_attention.indexer.", "self_attention.core_attention.indexer."),
    ("router.expert_table", "router.tid2eid"),
)
"""Name fragments in this program and in Megatron-LM's development branch."""


def in_megatron(name: str, value: Tensor) -> dict[str, Tensor]:
    """Names and tensors with which Megatron stores a parameter of DeepSeek-V4."""
    for own, megatron in V4_NAMES:
        name = name.replace(own, megatron)
    if name.endswith("hyper_connection.scale"):
        parts = [name.replace("scale", f"alpha_{part}") for part in ("pre", "post", "res")]
    elif name.endswith("eh_proj.weight"):
        parts = [name.replace("eh_proj", part) for part in ("e_proj", "h_proj")]
    else:
        return {name: value}
    return {part: each.clone() for part, each in zip(parts, value.chunk(len(parts), dim=-1), strict=True)}


def test_names_of_deepseek_v4(tmp_path: Path) -> None:
    """Compressed attention, hyper-connections and hash layers; no released Megatron-Core has all of them."""
    plan = import_megatron.plan_of_run(MODELS["v4"].split())
    shapes = import_megatron.build_meta_model(plan, FILES).state_dict()
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randint(9, like.shape, generator=generator).to(like.dtype) for name, like in shapes.items()}
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        stored |= in_megatron(name, value)
    assert len(stored) == len(weights) + 6 * 2 + 1, "three scales per connection, two projections"
    experts = {name: stored.pop(name) for name in [*stored] if ".mlp.experts." in name}
    stored |= {f"{name}{number}": each.clone() for name, value in experts.items() for number, each in enumerate(value)}
    save_rank(tmp_path / "ranks", {"model": stored, "args": Namespace(swiglu=True), "iteration": 3})
    found = imported(tmp_path / "ranks", tmp_path / "ours", "v4", "--no-optimizer")
    assert found.keys() == {f"model.{name}" for name in weights}
    for name, value in weights.items():
        EXACT.check(found[f"model.{name}"], value, name)


@pytest.mark.parametrize("model", ["gqa", "alike", "mla"])
def test_a_checkpoint_per_rank_has_the_same_weights(model: str, kept: Path, tmp_path: Path) -> None:
    whole = imported(kept / "0.19.2" / model, tmp_path / "whole", model)
    ranks = imported(kept / "0.19.2" / f"{model}-per-rank", tmp_path / "ranks", model, "--no-optimizer")
    assert set(ranks) == {key for key in whole if key.startswith("model.")}
    for key, value in ranks.items():
        EXACT.check(value.float(), whole[key].float(), key)


@pytest.mark.parametrize("stored", [True, False])
def test_shards_of_several_ranks_are_merged(stored: bool, kept: Path, tmp_path: Path, capsys) -> None:
    """Covers tp 2, pp 2 and ep 2. Older Megatron versions do not store the tensor-parallel size of experts."""
    weights, folder = whole_weights(kept, tmp_path), tmp_path / "cut"
    args = Namespace(pipeline_model_parallel_size=2, expert_model_parallel_size=2, swiglu=True)
    if stored:
        args.expert_tensor_parallel_size = 2
    for tp, pp, ep in product(range(2), repeat=3):
        content = {"model": cut(weights, tp, pp, ep), "args": args, "iteration": 3}
        save_rank(folder, content, f"mp_rank_{tp:02d}_{pp:03d}_{ep:03d}")
    second = imported(folder, tmp_path / "again", "gqa", "--no-optimizer")
    for name, value in weights.items():
        EXACT.check(second[f"model.{name}"].float(), value.float(), name)
    shutil.rmtree(folder / "mp_rank_01_000_001")
    assert refused(folder, tmp_path, "--no-optimizer") == ExitCode.CHECKPOINT
    assert "mp_rank_01_001_001 refers to the model of pipeline stage 0, which is missing" in capsys.readouterr().err


def test_the_mtp_projection_is_sharded_by_rows(tmp_path: Path) -> None:
    """`eh_proj`, its two parts with hyper-connections, and sinks, each sharded over two tensor-parallel ranks."""
    projections = [f"mtp.layers.0.{name}.weight" for name in ("eh_proj", "e_proj", "h_proj")]
    weight, names = torch.rand(6, 4), [*projections, "decoder.layers.0.self_attention.core_attention.attn_sink"]
    for tp in range(2):
        model = {name: weight.chunk(2)[tp].clone() for name in names}
        save_rank(tmp_path / "cut", {"model": model, "args": Namespace()}, f"mp_rank_{tp:02d}")
    found = PerRank(tmp_path / "cut")
    for name in names:
        assert found.tensors[name].shape == weight.shape
        EXACT.check(found.read(name, (0, 0), weight.shape), weight, name)


def cut(weights: dict[str, Tensor], tp: int, pp: int, ep: int) -> dict[str, Tensor]:
    """Shard of one Megatron rank: layer 0 on the first stage, and layer 1, named 0 there, on the second."""
    held = {}
    for name, value in weights.items():
        first = name.startswith(("embedding", "decoder.layers.0"))
        if first != (pp == 0):
            continue
        name = name.replace("decoder.layers.1.", "decoder.layers.0.")
        if "mlp.experts." in name:
            for number in range(2):
                matrix = name.split(".")[-2]
                piece = part(value[2 * ep + number], name, tp)
                held[f"decoder.layers.0.mlp.experts.local_experts.{number}.{matrix}.weight"] = piece
        else:
            held[name] = part(value, name, tp)
    return held


def part(value: Tensor, name: str, tp: int) -> Tensor:
    if "linear_fc1" in name:
        return torch.cat([half.chunk(2)[tp] for half in value.chunk(2)]).clone()
    if "linear_qkv" in name or "word_embeddings" in name or "output_layer" in name:
        return value.chunk(2)[tp].clone()
    return value.chunk(2, dim=1)[tp].clone() if "linear_proj" in name or "linear_fc2" in name else value


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("--moe-ffn-hidden-size 16", "linear_fc1.weight: [4, 32, 16] in the model, [4, 16, 16]"),
        ("--num-layers 3 --moe-layer-freq [0,1,1]", "missing: decoder.layers.2.self_attention.linear_qkv.weight"),
        ("--num-layers 1 --moe-layer-freq [0]", "left over: decoder.layers.1."),
    ],
)
def test_a_model_of_another_shape_is_rejected(change: str, problem: str, kept: Path, tmp_path: Path, capsys) -> None:
    model = f"{MODELS['gqa']} {change}"
    assert refused(kept / "0.19.2" / "gqa", tmp_path, model=model) == ExitCode.CHECKPOINT
    message = capsys.readouterr().err
    assert "does not fit this model" in message and problem in message


class Exploit:
    """Creates a file when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("victim", [".metadata", "common state", "tensor", "per rank", "object of FSDP"])
def test_pickles_of_a_checkpoint_are_not_executed(victim: str, kept: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    folder = copy_of(kept, tmp_path, "0.19.2/gqa-per-rank" if victim == "per rank" else "0.16.1/gqa")
    exploit = {"args": Exploit(evidence), "iteration": 3, "optimizer": Exploit(evidence)}
    match victim:
        case "per rank":
            torch.save(exploit, folder / "mp_rank_00" / "model_optim_rng.pt")
        case "object of FSDP":
            folder = tmp_path / "fsdp"
            dcp.save({"model.x": torch.ones(1), **exploit}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
        case ".metadata":
            (folder / ".metadata").write_bytes(pickle.dumps(Exploit(evidence)))
        case "common state":
            torch.save(exploit, folder / "common.pt")
        case "tensor":
            buffer = io.BytesIO()
            torch.save(Exploit(evidence), buffer)
            for file in folder.glob("*.distcp"):
                size = file.stat().st_size
                file.write_bytes((buffer.getvalue() * (size // len(buffer.getvalue()) + 1))[:size])
    assert refused(folder, tmp_path) == ExitCode.CHECKPOINT
    assert not evidence.exists(), "the pickle was executed"


def save_fsdp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint in the format fsdp_dtensor from tensors by its keys."""
    content = {**tensors, "args": Namespace(consumed_train_samples=6), "iteration": 3}
    dcp.save(content, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def fsdp_keys(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Keys and tensors with which Megatron-FSDP and Transformer Engine store one of our parameters."""
    for expert, each in enumerate(value) if "mlp.experts." in name else [("", value)]:
        halves = dict(zip(("_w", "_v"), each.chunk(2), strict=True)) if "linear_fc1" in name else {"": each}
        yield from ((f"model.module.{name}{expert}{half}", part.clone()) for half, part in halves.items())


def test_fsdp_experts_as_separate_tensors_are_stacked(kept: Path, tmp_path: Path, capsys) -> None:
    weights = whole_weights(kept, tmp_path)
    stored = dict(pair for name, value in weights.items() for pair in fsdp_keys(name, value))
    save_fsdp(tmp_path / "ckpt", stored)
    found = imported(tmp_path / "ckpt", tmp_path / "again", "gqa", "--no-optimizer")
    for name, value in weights.items():
        EXACT.check(found[f"model.{name}"].float(), value.float(), name)
    missing = "model.module.decoder.layers.1.mlp.experts.linear_fc1.weight2_v"
    assert missing in stored
    save_fsdp(tmp_path / "less", {key: value for key, value in stored.items() if key != missing})
    assert refused(tmp_path / "less", tmp_path, "--no-optimizer") == ExitCode.CHECKPOINT
    assert "others are missing, or shapes differ" in capsys.readouterr().err


def test_fsdp_sections_of_a_projection_are_joined(tmp_path: Path) -> None:
    name = "decoder.layers.0.self_attention.in_proj.weight"
    sizes = {"query": 4, "key": 4, "value": 6, "z": 6, "beta": 2, "alpha": 2}
    weight = torch.randn(24, 8, generator=torch.Generator().manual_seed(1))
    sections = zip(sizes, weight.split(list(sizes.values())), strict=True)
    save_fsdp(tmp_path / "ckpt", {f"model.module.{name}.{key}": part.clone() for key, part in sections})
    found = FSDPDTensor(tmp_path / "ckpt")
    assert found.tensors[name].shape == weight.shape
    for first, number in ((0, 24), (3, 1), (3, 12), (22, 2)):
        EXACT.check(found.read(name, (first, 2), (number, 5)), weight[first : first + number, 2:7], f"{first} {number}")


@pytest.mark.parametrize("model", ["v4", "mla"])
def test_joined_tensors_carry_their_optimizer_state(model: str, tmp_path: Path) -> None:
    """Scales and projections that hyper-connections split, and experts with separate gate and up halves. Every kind of
    state has different values."""
    shapes = import_megatron.build_meta_model(import_megatron.plan_of_run(MODELS[model].split()), FILES).state_dict()
    generator, stored, expected = torch.Generator().manual_seed(1), {}, {}
    for name, like in shapes.items():
        trained = like.is_floating_point() and not name.endswith("expert_bias")
        values = {"": torch.randint(9, like.shape, generator=generator).to(like.dtype)}
        values |= {kind: torch.rand(like.shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq") if trained}
        for kind, value in values.items():
            expected[f"{kind or 'model'}.{name}"] = value
            for part, each in (in_megatron(name, value) if model == "v4" else {name: value}).items():
                for key, tensor in fsdp_keys(part, each):
                    stored[f"optimizer.state.module.{key.removeprefix('model.')}.{kind}" if kind else key] = tensor
    stored |= {"optimizer.state.module.module.embedding.word_embeddings.weight.step": torch.tensor(3.0)}
    save_fsdp(tmp_path / "ckpt", stored)
    found = imported(tmp_path / "ckpt", tmp_path / "ours", model)
    assert found.pop("optimizer.step_count") == 3
    assert {key for key in found if not key.startswith("master.")} == expected.keys()
    for key, value in expected.items():
        EXACT.check(found[key], value, key)


def test_dcp_files_of_another_format_are_rejected(kept: Path, tmp_path: Path, capsys) -> None:
    folder = copy_of(kept, tmp_path)
    (folder / "metadata.json").unlink()
    assert refused(folder, tmp_path) == ExitCode.CHECKPOINT
    assert "has no weights in the format fsdp_dtensor" in capsys.readouterr().err


def test_names_that_are_not_allowed_become_inert(tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    found = load_pickle(pickle.dumps([Exploit(evidence), Path("x"), 3]), "a pickle")
    assert isinstance(found[0], Inert) and isinstance(found[1], Inert) and found[2] == 3
    assert not evidence.exists()


def test_tensors_that_exceed_their_storage_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "t.pt"
    torch.save(torch.arange(8.0).view(2, 4)[:, 1:3], file)
    EXACT.check(load_archive(file, "t").load(), torch.tensor([[1.0, 2.0], [5.0, 6.0]]), "a view")
    torch.save(torch.arange(8.0), file)
    with zipfile.ZipFile(file) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in content.items():
            archive.writestr(name, data[:16] if name.endswith("/data/0") else data)
    with pytest.raises(CheckpointProblem, match="exceeds its storage of 4 elements"):
        load_archive(file, "t").load()


@pytest.mark.parametrize("damage", ["no file", "cut", "other backend", "piece elsewhere"])
def test_a_damaged_checkpoint_is_rejected(damage: str, kept: Path, tmp_path: Path, capsys) -> None:
    folder = copy_of(kept, tmp_path)
    file = next(iter(sorted(folder.glob("*.distcp"))))
    match damage:
        case "no file":
            file.unlink()
        case "cut":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        case "other backend":
            (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
        case "piece elsewhere":
            metadata = (folder / ".metadata").read_bytes()
            (folder / ".metadata").write_bytes(metadata.replace(b"__0_0.distcp", b"../../passwd"))
    assert refused(folder, tmp_path) == ExitCode.CHECKPOINT
    assert str(folder) in capsys.readouterr().err


def test_a_norm_on_the_input_of_the_query_projection_is_rejected_by_name(kept: Path, tmp_path: Path, capsys) -> None:
    """Megatron-Core since July 2026, with --qk-layernorm and without a query latent."""
    weights = whole_weights(kept, tmp_path)
    name = "decoder.layers.0.self_attention.linear_q_proj.layer_norm_weight"
    save_rank(tmp_path / "ranks", {"model": {**weights, name: torch.ones(16)}, "args": Namespace()})
    assert refused(tmp_path / "ranks", tmp_path, "--no-optimizer") == ExitCode.CHECKPOINT
    message = capsys.readouterr().err
    assert name in message and "train with --q-lora-rank, or without --qk-layernorm" in message
    assert "left over" not in message


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ({"model": [1, 2]}, "model is not a dict of tensors"),
        ({"model0": {}, "model1": torch.zeros(3)}, "model1 is not a dict of tensors"),
        ([1], "does not contain a dict"),
        ({"model": {3: torch.zeros(3)}}, "malformed Megatron checkpoint"),
        ({"model": {}, "args": Namespace(pipeline_model_parallel_size="many")}, "malformed Megatron checkpoint"),
        ({"model": {}, "args": Namespace(), 5: 1}, "does not fit this model"),
    ],
)
def test_malformed_state_dicts_are_rejected(content: object, sentence: str, tmp_path: Path, capsys) -> None:
    save_rank(tmp_path / "ranks", content)
    assert refused(tmp_path / "ranks", tmp_path, "--no-optimizer") == ExitCode.CHECKPOINT
    message = capsys.readouterr().err
    assert sentence in message and str(tmp_path / "ranks") in message


def nested(depth: int) -> list:
    """A list in a list, and so on; the innermost contains the outermost."""
    outermost: list = []
    innermost = outermost
    for _ in range(depth):
        innermost.append([])
        innermost = innermost[0]
    innermost.append(outermost)
    return outermost


@pytest.mark.parametrize(
    ("common", "sentence"),
    [
        ({"optimizer": {"step": float("inf")}}, "the optimizer step count is not a count"),
        ({"optimizer": [{"step": 3}, {"step": 4}]}, "2 different optimizer step counts, expected one"),
        ({"optimizer": nested(3)}, "0 different optimizer step counts, expected one"),
        ({"optimizer": {"step": 3}, "iteration": "3"}, "iteration is not a count"),
        ({"optimizer": {"step": 3}, "iteration": -1}, "iteration is not a count"),
        ({"optimizer": {"step": 3}, "args": Namespace(consumed_train_samples=1 << 70)}, "consumed_train_samples is no"),
    ],
)
def test_invalid_counters_are_rejected(common: object, sentence: str, kept: Path, tmp_path: Path, capsys) -> None:
    folder = copy_of(kept, tmp_path)
    torch.save(common, folder / "common.pt")
    assert refused(folder, tmp_path) == ExitCode.CHECKPOINT
    assert sentence in capsys.readouterr().err


def test_a_very_deep_common_state_is_read_without_recursion() -> None:
    state: object = {"step": 3}
    for _ in range(10_000):
        state = [state]
    assert source._steps(state) == {3}


@pytest.mark.parametrize("name", ["metadata.json", ".metadata", "common.pt", "__0_0.distcp"])
def test_only_regular_files_are_opened(name: str, kept: Path, tmp_path: Path) -> None:
    folder = copy_of(kept, tmp_path)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    assert refused(folder, tmp_path) == ExitCode.CHECKPOINT


def test_a_fifo_as_tracker_is_ignored(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / import_megatron.TRACKER)
    assert import_megatron.tracked_checkpoint(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metadata.json", b"{"),
        ("metadata.json", b"[]"),
        ("metadata.json", b"[" * 1_000_000),
        (import_megatron.TRACKER, b"1" * 1_000_000),
        (import_megatron.TRACKER, b"../" * 20),
        (import_megatron.TRACKER, b"\xff"),
        (import_megatron.TRACKER, "²".encode()),
    ],
)
def test_damaged_metadata_files_are_named(name: str, content: bytes, tmp_path: Path, capsys):
    (tmp_path / name).write_bytes(content)
    flags = "--recipe quickstart --mock-data --tokenizer-type NullTokenizer --vocab-size 96 --data-path".split()
    assert import_megatron.main(["--load", str(tmp_path), "--save", str(tmp_path / "ours"), "--", *flags]) == 5
    assert name in capsys.readouterr().err
