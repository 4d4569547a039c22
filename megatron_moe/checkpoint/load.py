"""Selects the checkpoint of a run, verifies it, and loads it into any parallel layout.

Sources are tried in this order: `--ckpt-step`, the run's own `--save` folder, `--load`, `--pretrained-checkpoint`.
Within a folder, the newest checkpoint that verifies on all ranks is loaded. Every byte that is read is verified. If no
checkpoint verifies, the run ends, as a silent restart from iteration 0 would be far more expensive.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_moe.checkpoint import directory
from megatron_moe.checkpoint.async_save import run_parallel
from megatron_moe.checkpoint.directory import Candidate, as_checkpoint, checkpoints_folder, list_checkpoints
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    SAFETENSORS,
    TRAIN_STATE,
    CorruptCheckpoint,
    FormatTooNewError,
    Manifest,
    check_header,
    extents_by_file,
    parse_json,
    read_manifest,
)
from megatron_moe.checkpoint.tensor_shards import (
    FP8_AMAX_HISTORY,
    CheckpointReader,
    TensorShard,
    digest,
    dtype_name,
    fill_shard,
    is_scaling_state,
    is_weight,
    overlaps,
    partition_tensors,
    split_digests,
    tensor_key,
)
from megatron_moe.config.checkpoint import HUGGING_FACE, CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.text import listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

_NO_RULE_STATE = ("model", "master", "optimizer")
"""Kinds of tensors that do not depend on the update rule."""
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Name suffixes of the tensors with a row per token id, padding included."""
CheckState = Callable[[Mapping[str, Any], int], None]
"""Function that checks the content of train_state.json against the manifest's iteration. Raises CorruptCheckpoint."""


@dataclass(frozen=True)
class CheckpointSource:
    """Folder to load from, and which parts of the checkpoint to load."""

    origin: Literal["--ckpt-step", "--save", "--load", "--pretrained-checkpoint"]
    location: str
    candidates: tuple[Candidate, ...]
    """Checkpoints to try, newest first; empty for a Hugging Face folder."""
    optimizer: bool = True
    """Whether to load optimizer state in addition to weights."""
    train_state: bool = True
    """Whether to resume at the checkpoint's iteration; False starts at iteration 0 (`--finetune`)."""

    @property
    def is_hugging_face(self) -> bool:
        return self.location.startswith(HUGGING_FACE)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """Checkpoint that `load_checkpoint` has loaded."""

    path: Path
    iteration: int
    train_state: dict[str, Any]
    notes: frozenset[str] = frozenset()
    """Notes for the log about state that does not fit the run: delayed FP8 scaling, and parameters whose optimizer
    state is of another update rule."""


def find_checkpoint(
    config: CheckpointConfig, context: ParallelContext, *, say: Callable[[str], None] = print
) -> CheckpointSource | None:
    """Selects the folder to load from, on the first rank for all ranks; None if the run starts from random weights.

    Raises:
        CheckpointProblem: a requested checkpoint does not exist.
    """
    answer: CheckpointSource | str | None = None
    if context.is_first:
        try:
            answer = _choose(config, say)
        except CheckpointProblem as problem:
            answer = str(problem)
    # collective over world: a few hundred bytes
    (answer, *_) = gather_objects(answer, context.group("world"))
    if isinstance(answer, str):
        raise CheckpointProblem(answer)
    return answer


def find_progress(config: CheckpointConfig, context: ParallelContext) -> tuple[int, int]:
    """Iteration and number of consumed samples at which a run will start, before its checkpoint is loaded; zeros if
    none can be read. Collective."""
    progress = (0, 0)
    if context.is_first:
        with suppress(CheckpointProblem):
            progress = _progress(config, _choose(config, lambda line: None))
    # collective over world: two numbers
    return gather_objects(progress, context.group("world"))[0]


def _progress(config: CheckpointConfig, source: CheckpointSource | None) -> tuple[int, int]:
    if source is None or not source.train_state or (config.moe_use_upcycling and source.origin != "--save"):
        return 0, 0
    for candidate in source.candidates:
        with suppress(CorruptCheckpoint, FormatTooNewError, KeyError, TypeError):
            state = parse_json(CheckpointReader(candidate.path).read_head(TRAIN_STATE), TRAIN_STATE)["state"]
            number = None if source.origin == "--save" else config.override_ckpt_iteration
            progress = state["iteration"] if number is None else number, state["consumed_samples"]
            if all(type(each) is int for each in progress):
                return progress
    return 0, 0


def load_checkpoint(
    source: CheckpointSource,
    tensors: Mapping[str, TensorShard],
    context: ParallelContext,
    *,
    say: Callable[[str], None] = print,
    check_state: CheckState | None = None,
) -> LoadedCheckpoint:
    """Fills `tensors` (keyed by `tensor_key`) from the newest checkpoint in `source` that verifies on every rank.

    Without `source.optimizer`, only weights and buffers are filled, and their values are cast to the run's dtypes.

    Raises:
        CheckpointProblem: no checkpoint verifies, or the tensors of an intact one do not match this run's.
    """
    wanted = tensors if source.optimizer else {key: t for key, t in tensors.items() if is_weight(key)}
    # collective over world: 8 bytes per tensor of every rank
    known = set(split_digests(b"".join(gather_objects(b"".join(map(digest, wanted)), context.group("world")))))
    reasons = []
    for candidate in source.candidates:
        outcome = _load_candidate(candidate, wanted, known, check_state, casting=not source.optimizer)
        shared = outcome.notes if isinstance(outcome, LoadedCheckpoint) else outcome
        # collective over world: a few hundred bytes
        outcomes = gather_objects(shared, context.group("world"))
        tensor_mismatches = [mismatch.message for mismatch in outcomes if isinstance(mismatch, _Mismatch)]
        if tensor_mismatches:
            raise CheckpointProblem(tensor_mismatches[0])
        damages = [f"rank {rank}: {reason}" for rank, reason in enumerate(outcomes) if isinstance(reason, str)]
        if not damages:
            assert isinstance(outcome, LoadedCheckpoint), f"rank {context.rank}: {outcome}"
            for note in sorted(frozenset().union(*outcomes)) if context.is_first else ():
                say(note)
            return outcome
        reasons.append(f"{candidate.path}: {damages[0]}")
        if context.is_first and len(source.candidates) > 1:
            say(f"checkpoint {candidate.path} is damaged and not used: {damages[0]}")
    raise CheckpointProblem(_none_verifies(source, reasons))


@dataclass(frozen=True)
class _Mismatch:
    """Reason why this run cannot load an intact checkpoint. Unlike damage, a mismatch ends the search."""

    message: str


def _choose(config: CheckpointConfig, say: Callable[[str], None]) -> CheckpointSource | None:
    same_folder = bool(
        config.save and config.load and config.save.resolve() == checkpoints_folder(Path(config.load)).resolve()
    )
    own = list_checkpoints(config.save) if config.save is not None and not config.fresh else ()
    if own and same_folder and config.finetune:
        raise CheckpointProblem(
            f"--finetune starts at iteration 0, but --save {config.save} is the folder from which it loads, and "
            f"contains iteration {own[0].iteration}, which is newer than this run's checkpoints; give another --save "
            "folder"
        )
    if config.ckpt_step is not None:
        return _given_step(config, config.ckpt_step)
    if own:
        assert config.save is not None
        _report_stale_tracker(config.save, own, say)
        # --finetune and --no-load-optim apply to --load: a restart of the same command line must resume in full.
        load_optim = config.save_optim or _has_optimizer(own)
        resume = CheckpointConfig(load_optim=load_optim, skip_train=config.skip_train)
        return _make_source("--save", str(config.save), own, config if same_folder else resume)
    if config.load is not None and not (same_folder and config.fresh):
        source = _given_folder(config.load, config, say)
        if source is not None:
            return source
    if config.pretrained_checkpoint is None:
        return None
    # loads only weights and starts at iteration 0
    source = _source("--pretrained-checkpoint", config.pretrained_checkpoint, CheckpointConfig(finetune=True))
    if source is None:
        raise CheckpointProblem(
            f"{_describe_missing('--pretrained-checkpoint', config.pretrained_checkpoint)}; correct the folder"
        )
    return source


def _has_optimizer(candidates: Iterable[Candidate]) -> bool:
    """True if the newest checkpoint with a readable manifest has optimizer state: a run may be continued with
    `--no-save-optim`."""
    for candidate in candidates:
        with suppress(CorruptCheckpoint, FormatTooNewError):
            return not all(map(is_weight, read_manifest(candidate.path).tensors))
    return False


def _given_folder(location: str, config: CheckpointConfig, say: Callable[[str], None]) -> CheckpointSource | None:
    """Source for `--load`; None if the folder has no checkpoint and no flag requires one."""
    source = _source("--load", location, config)
    if source is not None:
        if source.candidates:
            _report_stale_tracker(checkpoints_folder(Path(location)), source.candidates, say)
        return source
    missing = _describe_missing("--load", location)
    if config.pretrained_checkpoint is not None:
        say(f"{missing}: --pretrained-checkpoint is used")
        return None
    requiring = {
        "--exit-on-missing-checkpoint": config.exit_on_missing_checkpoint,
        "--moe-use-upcycling": config.moe_use_upcycling,
        "--skip-train": config.skip_train,
    }
    flags = " and ".join(flag for flag, given in requiring.items() if given)
    if flags:
        raise CheckpointProblem(f"{missing}, which is required by {flags}; correct --load, or leave out {flags}")
    say(f"{missing}: starting from random weights")
    return None


def _candidates(location: str) -> tuple[Candidate, ...]:
    """The checkpoint `location`, or all checkpoints in the folder or run folder `location`, newest first."""
    itself = as_checkpoint(Path(location))
    if itself and (itself.path / MANIFEST).exists():
        return (itself,)
    return list_checkpoints(checkpoints_folder(Path(location)))


def _describe_missing(flag: str, location: str) -> str:
    where = f"{location} or {Path(location) / directory.RUN_FOLDER_CHECKPOINTS}"
    there = "" if Path(location).exists() else ", which does not exist,"
    return f"{flag} {location}{there} holds no checkpoint (looked for iter_NNNNNNN in {where})"


def _given_step(config: CheckpointConfig, step: int) -> CheckpointSource:
    location = config.load or (str(config.save) if config.save else None)
    if location is None or location.startswith(HUGGING_FACE):
        raise CheckpointProblem(f"--ckpt-step {step} needs --load or --save with a folder of checkpoints")
    found = list_checkpoints(checkpoints_folder(Path(location)))
    chosen = tuple(candidate for candidate in found if candidate.iteration == step)
    if not chosen:
        available = ", ".join(str(candidate.iteration) for candidate in found) or "none"
        raise CheckpointProblem(f"--ckpt-step {step}: {location} holds no such iteration; available: {available}")
    return _make_source("--ckpt-step", location, chosen, config)


def _source(flag: Any, location: str, config: CheckpointConfig) -> CheckpointSource | None:
    """Source for the folder `location` that `flag` names; None if the folder has no checkpoint."""
    if location.startswith(HUGGING_FACE):
        return _make_source(flag, location, (), config)
    candidates = _candidates(location)
    return _make_source(flag, location, candidates, config) if candidates else None


def _make_source(
    origin: Any, location: str, candidates: tuple[Candidate, ...], config: CheckpointConfig
) -> CheckpointSource:
    return CheckpointSource(
        origin,
        location,
        candidates,
        optimizer=config.load_optim and not config.finetune and not config.skip_train,
        train_state=not config.finetune,
    )


def _report_stale_tracker(folder: Path, found: Sequence[Candidate], say: Callable[[str], None]) -> None:
    tracker, newest = directory.read_tracker(folder), found[0].iteration
    if tracker is not None and tracker != str(newest):
        say(f"ignored {folder / directory.TRACKER}, which says {tracker!r}; the newest iteration is {newest}")


def _load_candidate(
    candidate: Candidate,
    wanted: Mapping[str, TensorShard],
    known: Set[bytes],
    check_state: CheckState | None,
    *,
    casting: bool,
) -> "LoadedCheckpoint | _Mismatch | str":
    """Loads one checkpoint. Returns a text about the damage if it is corrupt, or a mismatch if it does not fit the run.

    `known`: digests of all tensor keys that any rank loads. `casting`: load only weights, from any dtype.
    """
    try:
        reader = CheckpointReader(candidate.path)
        reader.check_sizes()
        manifest = reader.manifest
        if manifest.iteration != candidate.iteration:
            raise CorruptCheckpoint(f"{MANIFEST}: its iteration {manifest.iteration} differs from that of the folder")
        problems = tensor_mismatches(wanted, known, manifest, casting)
        if problems:
            rows = _vocabulary_rows(wanted, manifest)
            padding = (
                "" if rows is None else f"--padded-vocab-size {rows} (its default depends on tensor parallelism), "
            )
            return _Mismatch(
                f"checkpoint {candidate.path} does not fit this run in {len(problems)} tensors; give the model flags "
                f"it was saved with, {padding}--moe-use-upcycling to upcycle a dense model, or --load "
                f"{candidate.path.parent} --no-load-optim if only the optimizer state differs:\n  {listed(problems)}"
            )
        notes = scaling_differences(wanted, known, manifest) | rule_differences(known, manifest, casting)
        renewed = set() if casting else _renewed_state(known, manifest.tensors)
        wanted = {key: target for key, target in wanted.items() if key in manifest.tensors and key not in renewed}
        extents = extents_by_file(manifest)
        for name in _used_files(wanted, manifest):
            head = reader.read_head(name)
            if name.endswith(SAFETENSORS):
                check_header(name, head, extents.get(name, ()))
        state = parse_json(reader.read_head(TRAIN_STATE), TRAIN_STATE)
        if check_state is not None:
            check_state(state, manifest.iteration)
        run_parallel([partial(_fill_all, candidate.path, manifest, part) for part in partition_tensors(wanted)])
    except FormatTooNewError as problem:
        return _Mismatch(f"checkpoint {candidate.path} was {problem}; update the program or load an older checkpoint")
    except CorruptCheckpoint as problem:
        return str(problem)
    return LoadedCheckpoint(candidate.path, candidate.iteration, state, notes)


def _vocabulary_rows(wanted: Mapping[str, TensorShard], manifest: Manifest) -> int | None:
    """Number of rows of the vocabulary in the checkpoint if this run has another one, else None."""
    for key, target in wanted.items():
        entry = manifest.tensors.get(key)
        if entry is None or not key.endswith(_VOCABULARY):
            continue
        if entry.shape != target.shape and entry.shape[1:] == target.shape[1:]:
            return entry.shape[0]
    return None


def _fill_all(path: Path, manifest: Manifest, wanted: Mapping[str, TensorShard]) -> None:
    reader = CheckpointReader(path, manifest)
    for key, target in wanted.items():
        fill_shard(target, manifest.tensors[key], partial(reader.read_piece, key))


def _used_files(wanted: Mapping[str, TensorShard], manifest: Manifest) -> list[str]:
    """Names of the files to verify: those that contain a piece of a wanted shard, and all text files."""
    wanted_pieces = (
        piece for key, target in wanted.items() for piece in manifest.tensors[key].pieces if overlaps(target, piece)
    )
    used = {piece.file for piece in wanted_pieces}
    stored = {piece.file for entry in manifest.tensors.values() for piece in entry.pieces}
    return [name for name in manifest.files if name in used or name not in stored]


def tensor_mismatches(
    wanted: Mapping[str, TensorShard], known: Set[bytes], manifest: Manifest, casting: bool
) -> list[str]:
    """Lists differences in keys, shapes and dtypes between run and checkpoint, without those of
    `scaling_differences` and `rule_differences`. `known`: digests of all ranks' keys."""
    saved = {key: entry for key, entry in manifest.tensors.items() if not casting or is_weight(key)}
    missing, unknown = _other_keys(wanted, known, saved)
    replaced = _replaced_names(known, saved)

    def is_ignored(key: str) -> bool:
        kind, _, name = key.partition(".")
        return is_scaling_state(key) or (kind not in _NO_RULE_STATE and name in replaced)

    problems = [f"missing in the checkpoint: {key}" for key in missing if not is_ignored(key)]
    problems += [f"unknown to this run: {key}" for key in unknown if not is_ignored(key)]
    for key in wanted.keys() & saved.keys():
        target, entry = wanted[key], saved[key]
        skipped = 1 if key.endswith(FP8_AMAX_HISTORY) else 0
        if target.shape[skipped:] != entry.shape[skipped:]:
            problems.append(f"shape of {key}: {list(entry.shape)} in the checkpoint, {list(target.shape)} in this run")
        elif not casting and dtype_name(target.dtype) != entry.dtype:
            problems.append(f"type of {key}: {entry.dtype} in the checkpoint, {dtype_name(target.dtype)} in this run")
    return sorted(problems)


def scaling_differences(wanted: Mapping[str, TensorShard], known: Set[bytes], manifest: Manifest) -> frozenset[str]:
    """Messages about state of delayed FP8 scaling that the checkpoint lacks, that this run does not use, or whose amax
    history has another length. `known`: digests of all ranks' keys."""
    notes, saved = [], {key: entry for key, entry in manifest.tensors.items() if is_scaling_state(key)}
    missing, unknown = _other_keys({key: None for key in wanted if is_scaling_state(key)}, known, saved)
    if missing:
        notes.append(
            "the checkpoint has no delayed FP8 scales of some layers; they start with scale 1 and no amax history"
        )
    if unknown:
        notes.append("delayed FP8 scales and amax histories of the checkpoint are ignored in layers that use none")
    for key in wanted.keys() & saved.keys():
        now, then = wanted[key].shape[0], saved[key].shape[0]
        if key.endswith(FP8_AMAX_HISTORY) and now != then:
            change = f"the {now} newest steps are used" if now < then else "the history of older steps starts empty"
            notes.append(f"amax histories of {then} steps in the checkpoint, --fp8-amax-history-len {now}: {change}")
    return frozenset(notes)


def rule_differences(known: Set[bytes], manifest: Manifest, casting: bool) -> frozenset[str]:
    """Message about parameters that another update rule stepped before the checkpoint was saved. `known`: digests of
    all ranks' keys."""
    if casting or not _replaced_names(known, manifest.tensors):
        return frozenset()
    kinds = sorted({key.partition(".")[0] for key in _renewed_state(known, manifest.tensors)} - {*_NO_RULE_STATE})
    others = f"; {' and '.join(kinds)} of all other parameters and the step count start at zero too" if kinds else ""
    return frozenset(
        {
            "the checkpoint contains optimizer state of another update rule for some parameters; their "
            f"state is initialised anew{others}"
        }
    )


def _renewed_state(known: Set[bytes], saved: Mapping[str, Any]) -> set[str]:
    """Keys of saved state that is not loaded, although a rank has it, because some parameters have new state of the
    same kind. One step count corrects the bias of all moments, so all of them must start at the same step. If no state
    of an update rule is left, the step count starts at zero too. `known`: digests of all ranks' keys."""
    kinds = {key: key.partition(".")[0] for key in saved}
    rule_kinds = {*kinds.values()} - {*_NO_RULE_STATE}
    replaced = _replaced_names(known, saved)
    new = {kind for kind in rule_kinds if any(digest(tensor_key(kind, name)) in known for name in replaced)}
    renewed = {key for key, kind in kinds.items() if kind in new}
    is_any_left = any(kind in rule_kinds - new and digest(key) in known for key, kind in kinds.items())
    return renewed if not replaced or is_any_left else renewed | {tensor_key("optimizer", "step_count")}


def _replaced_names(known: Set[bytes], saved: Mapping[str, Any]) -> set[str]:
    """Names of the parameters for which run and checkpoint have no kind of state in common. `known`: digests of all
    ranks' keys."""
    kept: dict[str, bool] = {}
    for key in saved:
        kind, _, name = key.partition(".")
        if kind not in _NO_RULE_STATE:
            kept[name] = kept.get(name, False) or digest(key) in known
    return {name for name, is_kept in kept.items() if not is_kept}


def _other_keys(wanted: Mapping[str, Any], known: Set[bytes], saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Returns (keys of this rank that the checkpoint lacks, keys of the checkpoint that no rank has). `known`: digests
    of the keys of all ranks."""
    missing = [key for key in wanted if key not in saved]
    return missing, [key for key in saved if key not in wanted and digest(key) not in known]


def _none_verifies(source: CheckpointSource, reasons: list[str]) -> str:
    if source.origin == "--ckpt-step":
        summary = "the checkpoint of --ckpt-step is damaged; no other iteration is tried"
    else:
        remedy = "--fresh to start over" if source.origin == "--save" else "another folder"
        summary = f"none of the {len(reasons)} checkpoints of {source.location} passes verification; give {remedy}"
    return f"{summary}:\n  {listed(reasons)}"
