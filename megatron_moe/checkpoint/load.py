"""Loading: the newest checkpoint that verifies, to the last byte used, or a refusal that says why.

The folder is chosen first: the iteration asked for, else the run's own save folder, else `--load`, else
`--pretrained-checkpoint`. Inside a folder a candidate that does not verify on any rank is dropped by all ranks
together, with one line, and the next older one is tried. A folder whose checkpoints are all damaged ends the run: to
start from iteration 0 unasked would be the most expensive silent failure there is.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from megatron_moe.checkpoint.async_save import at_once
from megatron_moe.checkpoint.bounded_read import read_bounded
from megatron_moe.checkpoint.directory import (
    TRACKER,
    Candidate,
    as_checkpoint,
    list_checkpoints,
    read_tracker,
)
from megatron_moe.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SAFETENSORS,
    TRAIN_STATE,
    CorruptCheckpoint,
    Manifest,
    NewerFormat,
    check_header,
    decode,
    parse_json,
    places_by_file,
)
from megatron_moe.checkpoint.tensor_shards import (
    FileReader,
    SavedTensor,
    digest,
    dtype_name,
    fill,
    in_parts,
    is_weight,
    overlaps,
    split_digests,
)
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem, listed
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.context import ParallelContext

HUGGING_FACE = "hf:"
RUN_FOLDER_CHECKPOINTS = "checkpoints"
CheckState = Callable[[Mapping[str, Any], int], None]
"""Validates the content of train_state.json, given the manifest's iteration. Raises Corrupt."""


@dataclass(frozen=True)
class CheckpointSource:
    """Where to load from, and what of it."""

    origin: Literal["--ckpt-step", "--save", "--load", "--pretrained-checkpoint"]
    location: str
    candidates: tuple[Candidate, ...]
    """Newest first; empty for a Hugging Face folder."""
    optimizer: bool = True
    """Load optimizer state; else weights only."""
    train_state: bool = True
    """Go on from the checkpoint's iteration; else start at 0 (`--finetune`)."""

    @property
    def is_hugging_face(self) -> bool:
        return self.location.startswith(HUGGING_FACE)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint whose tensors are in place."""

    path: Path
    iteration: int
    train_state: dict[str, Any]


def find(
    config: CheckpointConfig, context: ParallelContext, *, say: Callable[[str], None] = print
) -> CheckpointSource | None:
    """Chooses the folder to load from; None when the run starts from random weights.

    The first rank looks, all get its answer.

    Raises:
        CheckpointProblem: what was asked for is not there.
    """
    answer: CheckpointSource | str | None = None
    if context.is_first:
        try:
            answer = _choose(config, say)
        except CheckpointProblem as problem:
            answer = str(problem)
    # world: some hundred bytes
    (answer, *_) = gather_objects(answer, context.group("world"))
    if isinstance(answer, str):
        raise CheckpointProblem(answer)
    return answer


def load(
    source: CheckpointSource,
    tensors: Mapping[str, SavedTensor],
    context: ParallelContext,
    *,
    say: Callable[[str], None] = print,
    check_state: CheckState | None = None,
) -> LoadedCheckpoint:
    """Fills `tensors` (by `shards.tensor_key`) from the newest candidate that verifies on every rank.

    With `source.optimizer` False only weights and buffers are filled, and cast to the run's dtype where it differs.
    `check_state` validates the content of train_state.json; a candidate that fails is not used.

    Raises:
        CheckpointProblem: no candidate verifies, or its tensors are not those of this run.
    """
    wanted = tensors if source.optimizer else {key: t for key, t in tensors.items() if is_weight(key)}
    # world: 8 bytes per tensor of every rank
    known = set(split_digests(b"".join(gather_objects(b"".join(map(digest, wanted)), context.group("world")))))
    reasons = []
    for candidate in source.candidates:
        outcome = _attempt(candidate, wanted, known, check_state, casting=not source.optimizer)
        # world: some hundred bytes
        outcomes = gather_objects(outcome if isinstance(outcome, str | _Refusal) else None, context.group("world"))
        refusals = [refusal.sentence for refusal in outcomes if isinstance(refusal, _Refusal)]
        if refusals:
            raise CheckpointProblem(refusals[0])
        damages = [f"rank {rank}: {reason}" for rank, reason in enumerate(outcomes) if reason is not None]
        if not damages:
            assert isinstance(outcome, LoadedCheckpoint), f"rank {context.rank}: {outcome}"
            return outcome
        reasons.append(f"{candidate.path}: {damages[0]}")
        if context.is_first and len(source.candidates) > 1:
            say(f"checkpoint {candidate.path} is damaged and not used: {damages[0]}")
    raise CheckpointProblem(_nothing_verifies(source, reasons))


@dataclass(frozen=True)
class _Refusal:
    """Why an undamaged checkpoint cannot be used."""

    sentence: str


def _choose(config: CheckpointConfig, say: Callable[[str], None]) -> CheckpointSource | None:
    same_folder = bool(config.save and config.load and config.save.resolve() == _checkpoints_of(config.load).resolve())
    own = list_checkpoints(config.save) if config.save is not None and not config.fresh else ()
    if own and same_folder and config.finetune:
        raise CheckpointProblem(
            f"--finetune starts at iteration 0, but --save {config.save} is the folder it loads from and holds "
            f"iteration "
            f"{own[0].iteration}, which would always be newer than what this run saves; give another --save folder"
        )
    if config.ckpt_step is not None:
        return _given_step(config, config.ckpt_step)
    if own:
        assert config.save is not None
        _mention_tracker(config.save, own, say)
        # --finetune and --no-load-optim speak of --load: a restart of the same command line must resume in full.
        resume = CheckpointConfig(load_optim=config.save_optim, weights_only=config.weights_only)
        return _source("--save", str(config.save), own, config if same_folder else resume)
    if config.load is not None and not (same_folder and config.fresh):
        source = _given_folder(config.load, config, say)
        if source is not None:
            return source
    return None if config.pretrained is None else _pretrained(config.pretrained)


def _given_folder(location: str, config: CheckpointConfig, say: Callable[[str], None]) -> CheckpointSource | None:
    """What `--load` names; None when nothing is there and the run may start without it."""
    if location.startswith(HUGGING_FACE):
        return _source("--load", location, (), config)
    found = _candidates(location)
    if found:
        _mention_tracker(_checkpoints_of(location), found, say)
        return _source("--load", location, found, config)
    missing = _holds_nothing("--load", location)
    if config.pretrained is not None:
        say(f"{missing}: --pretrained-checkpoint is used")
        return None
    in_need = _flags_in_need(config)
    if in_need:
        flags = " and ".join(in_need)
        raise CheckpointProblem(f"{missing}, and {flags} cannot do without; correct --load, or leave out {flags}")
    say(f"{missing}: starting from random weights")
    return None


def _flags_in_need(config: CheckpointConfig) -> list[str]:
    """The flags of this run that mean nothing without a checkpoint."""
    flags = {
        "--exit-on-missing-checkpoint": config.exit_on_missing,
        "--moe-use-upcycling": config.upcycle,
        "--finetune": config.finetune,
        "--skip-train": config.weights_only,
        "--no-load-optim": not config.load_optim and not config.upcycle,
    }
    return [flag for flag, given in flags.items() if given]


def _checkpoints_of(location: str) -> Path:
    """The folder with the checkpoints: the one named, or the `checkpoints` of the run folder named."""
    folder, inside = Path(location), Path(location) / RUN_FOLDER_CHECKPOINTS
    return inside if inside.is_dir() and not list_checkpoints(folder) else folder


def _candidates(location: str) -> tuple[Candidate, ...]:
    """Newest first: of the folder named, of the run folder named, or the checkpoint named itself."""
    itself = as_checkpoint(Path(location))
    if itself and (itself.path / MANIFEST).exists():
        return (itself,)
    return list_checkpoints(_checkpoints_of(location))


def _holds_nothing(flag: str, location: str) -> str:
    where = f"{location} or {Path(location) / RUN_FOLDER_CHECKPOINTS}"
    there = "" if Path(location).exists() else ", which does not exist,"
    return f"{flag} {location}{there} holds no checkpoint (looked for iter_NNNNNNN in {where})"


def _given_step(config: CheckpointConfig, step: int) -> CheckpointSource:
    location = config.load or (str(config.save) if config.save else None)
    if location is None or location.startswith(HUGGING_FACE):
        raise CheckpointProblem(f"--ckpt-step {step} needs --load or --save with a folder of checkpoints")
    found = list_checkpoints(_checkpoints_of(location))
    chosen = tuple(candidate for candidate in found if candidate.iteration == step)
    if not chosen:
        there = ", ".join(str(candidate.iteration) for candidate in found) or "none"
        raise CheckpointProblem(f"--ckpt-step {step}: {location} holds no such iteration; there are: {there}")
    return _source("--ckpt-step", location, chosen, config)


def _pretrained(location: str) -> CheckpointSource:
    """Weights only, from iteration 0."""
    config = CheckpointConfig(finetune=True)
    if location.startswith(HUGGING_FACE):
        return _source("--pretrained-checkpoint", location, (), config)
    found = _candidates(location)
    if not found:
        raise CheckpointProblem(f"{_holds_nothing('--pretrained-checkpoint', location)}; correct the folder")
    return _source("--pretrained-checkpoint", location, found, config)


def _source(
    origin: Any, location: str, candidates: tuple[Candidate, ...], config: CheckpointConfig
) -> CheckpointSource:
    return CheckpointSource(
        origin,
        location,
        candidates,
        optimizer=config.load_optim and not config.finetune and not config.weights_only,
        train_state=not config.finetune,
    )


def _mention_tracker(folder: Path, found: Sequence[Candidate], say: Callable[[str], None]) -> None:
    tracker, newest = read_tracker(folder), found[0].iteration
    if tracker is not None and tracker != str(newest):
        say(f"{folder / TRACKER} says {tracker!r} and is ignored: the newest checkpoint is of iteration {newest}")


def _attempt(
    candidate: Candidate,
    wanted: Mapping[str, SavedTensor],
    known: Set[bytes],
    check_state: CheckState | None,
    *,
    casting: bool,
) -> "LoadedCheckpoint | _Refusal | str":
    """Loads one candidate; or why it is unusable (_Refusal) or damaged (text). `known`: what any rank wants."""
    try:
        manifest, reader = _open(candidate.path)
        if manifest.iteration != candidate.iteration:
            raise CorruptCheckpoint(f"{MANIFEST}: of iteration {manifest.iteration}, in a folder of another name")
        problems = _mismatches(wanted, known, manifest, casting)
        if problems:
            return _Refusal(_does_not_fit(candidate.path, problems))
        places = places_by_file(manifest)
        for name in _used_files(wanted, manifest):
            head = reader.head(name)
            if name.endswith(SAFETENSORS):
                check_header(name, head, places.get(name, ()))
        state = parse_json(reader.head(TRAIN_STATE), TRAIN_STATE)
        if check_state is not None:
            check_state(state, manifest.iteration)
        at_once([partial(_fill_all, candidate.path, manifest, part) for part in in_parts(wanted)])
    except NewerFormat as problem:
        return _Refusal(f"checkpoint {candidate.path} was {problem}; update the program or load an older checkpoint")
    except CorruptCheckpoint as problem:
        return str(problem)
    return LoadedCheckpoint(candidate.path, candidate.iteration, state)


def _fill_all(path: Path, manifest: Manifest, wanted: Mapping[str, SavedTensor]) -> None:
    reader = FileReader(path, manifest.files)
    for key, target in wanted.items():
        entry = manifest.tensors[key]
        fill(target, entry, partial(reader.piece, key, entry))


def _open(path: Path) -> tuple[Manifest, FileReader]:
    """Reads the manifest and checks that all files are there in full."""
    manifest = read_manifest(path)
    reader = FileReader(path, manifest.files)
    reader.check_sizes()
    return manifest, reader


def read_manifest(path: Path) -> Manifest:
    """The checked manifest of a checkpoint folder. Raises Corrupt and NewerFormat."""
    try:
        data = read_bounded(path / MANIFEST, MAX_MANIFEST_BYTES)
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST}: {error.strerror}") from error
    return decode(data)


def _used_files(wanted: Mapping[str, SavedTensor], manifest: Manifest) -> list[str]:
    """Files with something that is wanted, and all texts."""
    wanted_pieces = (
        piece for key, target in wanted.items() for piece in manifest.tensors[key].pieces if overlaps(target, piece)
    )
    used = {piece.file for piece in wanted_pieces}
    stored = {piece.file for entry in manifest.tensors.values() for piece in entry.pieces}
    return [name for name in manifest.files if name in used or name not in stored]


def _mismatches(wanted: Mapping[str, SavedTensor], known: Set[bytes], manifest: Manifest, casting: bool) -> list[str]:
    """Every difference between what this run has and what the checkpoint holds."""
    saved = {key: entry for key, entry in manifest.tensors.items() if not casting or is_weight(key)}
    problems = [f"missing in the checkpoint: {key}" for key in wanted if key not in saved]
    problems += [f"unknown to this run: {key}" for key in saved if key not in wanted and digest(key) not in known]
    for key in wanted.keys() & saved.keys():
        target, entry = wanted[key], saved[key]
        if target.shape != entry.shape:
            problems.append(f"shape of {key}: {list(entry.shape)} in the checkpoint, {list(target.shape)} in this run")
        elif not casting and dtype_name(target.dtype) != entry.dtype:
            problems.append(f"type of {key}: {entry.dtype} in the checkpoint, {dtype_name(target.dtype)} in this run")
    return sorted(problems)


def _does_not_fit(path: Path, problems: list[str]) -> str:
    return (
        f"checkpoint {path} does not fit this run in {len(problems)} tensors; give the model flags it was saved with, "
        f"--moe-use-upcycling to make experts of a dense model, or --no-load-optim when only optimizer state differs:\n"
        f"  {listed(problems)}"
    )


def _nothing_verifies(source: CheckpointSource, reasons: list[str]) -> str:
    if source.origin == "--ckpt-step":
        what = "the checkpoint asked for with --ckpt-step is damaged and is not replaced by another one"
    else:
        remedy = "--fresh to start over" if source.origin == "--save" else f"another folder than {source.location}"
        what = f"none of the {len(reasons)} checkpoints of {source.location} verifies; give {remedy}"
    return f"{what}:\n  {listed(reasons)}"
