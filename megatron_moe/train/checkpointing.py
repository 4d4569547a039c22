"""Checkpointing of a run: contents of its checkpoints, when they are saved, and how a run resumes from one."""

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import InitVar, dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from torch import nn

from megatron_moe.checkpoint.directory import checkpoints_folder
from megatron_moe.checkpoint.huggingface.load import load_hf
from megatron_moe.checkpoint.load import CheckpointSource, LoadedCheckpoint, find_checkpoint, load_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver, SavedCheckpoint
from megatron_moe.checkpoint.tensor_shards import TensorShard, tensor_key
from megatron_moe.config.checkpoint import HUGGING_FACE, CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem, NumericsProblem, Preempted, SaveProblem
from megatron_moe.config.param_meta import sharded_dim
from megatron_moe.config.text import listed, num_bytes_text
from megatron_moe.config.train_state import TrainStateConfig
from megatron_moe.data.loader import TrainLoader
from megatron_moe.kernels.ops import all_finite
from megatron_moe.logs.reporter import Reporter
from megatron_moe.parallel.collectives import gather_objects
from megatron_moe.parallel.parameter import named_parameters
from megatron_moe.resilience.run_status import RunStatus
from megatron_moe.train.hf_export import HuggingFaceExport
from megatron_moe.train.load_upcycled import load_upcycled
from megatron_moe.train.train_state import TrainState, check_train_state, config_differences
from megatron_moe.train.trainer import Trainer

PROGRESS = "progress.txt"
_GRACE_SECONDS = 30.0
"""Default time that launchers wait between the exit signal and SIGKILL."""
_LONGER_GRACE: Mapping[str, str] = MappingProxyType(
    {"torchrun": "give torchrun --shutdown-timeout {0}", "slurm": "give sbatch --signal=USR1@{0}"}
)
"""Launcher name -> advice on how to make the launcher wait {0} seconds between exit signal and SIGKILL."""


class ProgressLog:
    """Appends one line per launch and per checkpoint to progress.txt (`--log-progress`); write errors are ignored.

    Args:
        folder: checkpoint folder, in which progress.txt is written; None if nothing is written.
        environ: environment variables, of which SLURM_JOB_ID is logged.
    """

    def __init__(self, folder: Path | None, num_ranks: int, environ: Mapping[str, str] = os.environ) -> None:
        self._path = None if folder is None else folder / PROGRESS
        self._prefix = f"Job ID: {environ.get('SLURM_JOB_ID', '')}\t# GPUs: {num_ranks}"
        self._num_ranks = num_ranks
        self._begun = time.monotonic()
        self._first_flops = 0.0
        self._pending: dict[int, tuple[float, int]] = {}
        """Iteration of a checkpoint that is being written -> (FLOPs, tokens) of the run up to this iteration."""

    def record_start(self, state: TrainState) -> None:
        """Records the start or resumption of the run."""
        self._first_flops = state.flops
        self._write(f"Starting job\tIteration: {state.iteration}")

    def record_save_start(self, state: TrainState) -> None:
        """Called when a save begins; stores the run's FLOPs and tokens, which `record_saved` writes."""
        self._pending[state.iteration] = state.flops, state.consumed_tokens

    def record_saved(self, iteration: int) -> None:
        """Writes the line of a completed checkpoint."""
        flops, tokens = self._pending.pop(iteration)
        rate = (flops - self._first_flops) / (time.monotonic() - self._begun) / self._num_ranks / 1e12
        self._write(
            f"Saved checkpoint\tIteration: {iteration}\tJob throughput: {rate:.1f} TFLOP/s/GPU\t"
            f"Floating-point operations: {flops:.2e}\tTokens (in billions): {tokens / 1e9:.2f}"
        )

    def _write(self, text: str) -> None:
        if self._path is None:
            return
        with suppress(OSError), open(self._path, "a") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S}\t{self._prefix}\t{text}\n")


@dataclass
class Checkpointing:
    """Restores a run at its start and saves its checkpoints."""

    config: CheckpointConfig
    run: TrainStateConfig
    trainer: Trainer
    saver: CheckpointSaver | None
    """Writer of the checkpoints; None for a run without checkpoints."""
    reporter: Reporter
    status: RunStatus
    log_progress: InitVar[bool] = False
    """True if `--log-progress` is given."""
    launcher: str | None = None
    """Launcher name, for a warning if saves take longer than the launcher waits after a signal; None means no
    warning."""

    def __post_init__(self, log_progress: bool) -> None:
        context = self._context = self.trainer.context
        self._last_saved: int | None = None
        self._exports = HuggingFaceExport.of(self.config, self.run.model, context, self.reporter)
        writes = log_progress and context.is_first and self.saver is not None
        self._progress = ProgressLog(self.config.save if writes else None, context.group("world").size)

    def restore(self, loader: TrainLoader | None) -> TrainState:
        """Loads the checkpoint that the flags (`--save`, `--load`, ...) select, if any, and positions the data loader.

        Raises CheckpointProblem if the checkpoint is missing, damaged or incompatible.
        """
        source = find_checkpoint(self.config, self._context, say=self.reporter.note)
        state = TrainState() if source is None else self._restore_from(source, loader)
        number = self.config.override_ckpt_iteration
        if number is not None and source is not None and source.origin != "--save":
            self.reporter.note(f"the checkpoint's iteration {state.iteration} is renumbered to {number}")
            state.iteration = number
        self._progress.record_start(state)
        resumed = source is not None and source.origin == "--save"
        self.status.update(iteration=state.iteration, last_checkpoint=state.iteration if resumed else None)
        if loader is not None:
            loader.restore(state.consumed_samples)
            loader.require_steps(state.last_iteration(self.run) - state.iteration)
            self._report_length(state)
        if source is not None and self._upcycles(source):
            self.save(state, loader)  # saves the converted model even if the run does not train
        else:
            self._last_saved = state.iteration
        return state

    def is_due(self, iteration: int) -> bool:
        """True if a checkpoint or an export is due after this iteration."""
        intervals = (self.config.save_interval, self.config.save_hf_interval)
        return bool(self.saver) and any(_divides(interval, iteration) for interval in intervals)

    def save_if_due(self, state: TrainState, loader: TrainLoader | None) -> None:
        config = self.config
        if _divides(config.save_interval, state.iteration):
            self.save(state, loader, in_background=config.async_save)
        if _divides(config.save_hf_interval, state.iteration):
            self._export(state)

    def commit_if_written(self) -> None:
        """Completes an asynchronous save whose files are written; called after every step."""
        if self.saver is not None and self.saver.pending is not None:
            self._record_saved(self.saver.poll())

    def save_last(self, state: TrainState, loader: TrainLoader | None) -> None:
        """Writes the export and the checkpoint at the end of the run. Raises SaveProblem if the save failed."""
        self._export(state)
        self.save(state, loader)
        if self.saver is not None and self._last_saved != state.iteration:
            raise SaveProblem(
                f"the last checkpoint, of iteration {state.iteration}, could not be saved to {self.saver.folder}; "
                f"{self._newest()}; fix the error reported above and start the run again"
            )

    def exit_preempted(self, state: TrainState, loader: TrainLoader | None, reason: str) -> NoReturn:
        """Saves a last checkpoint, then raises Preempted, whose exit code depends on whether the save succeeded."""
        suffix = ""
        try:
            self.save(state, loader)
        except SaveProblem as problem:
            suffix = f"; {problem}"
        if self._last_saved == state.iteration:
            command = self._continuing_command(state.iteration)
            raise Preempted(f"{reason}; all iterations are saved; {command} continues from here", saved=True)
        none = "no --save folder, so the trained iterations are lost; give --save or --save-interval to keep them"
        where = none if self.saver is None else self._newest()
        raise Preempted(f"{reason}, without a checkpoint of this iteration: {where}{suffix}", saved=False)

    def _continuing_command(self, iteration: int) -> str:
        """Command line that continues after a saved iteration. With `--ckpt-step`, the same one starts again from its
        checkpoint."""
        config = self.config
        if config.ckpt_step is None:
            return "the same command"
        if config.load is None or config.save == checkpoints_folder(Path(config.load)):
            return f"the same command with --ckpt-step {iteration}"
        return "the same command without --ckpt-step"

    def close(self) -> None:
        """Closes the saver of a run that ends for any reason; a commit in progress is completed."""
        iteration = self.saver.close() if self.saver is not None else None
        if iteration is not None:
            self.status.update(last_checkpoint=iteration)
            self.reporter.note(f"  the checkpoint of iteration {iteration:7d} was completed while the run ended")

    def _newest(self) -> str:
        """Clause for error messages that names the newest checkpoint in the --save folder."""
        newest = self.status.report.last_checkpoint
        return (
            "no checkpoint has been saved yet" if newest is None else f"the newest checkpoint is of iteration {newest}"
        )

    def save(self, state: TrainState, loader: TrainLoader | None, *, in_background: bool = False) -> None:
        """Saves a checkpoint unless one of this iteration exists. A write error is reported; training continues.

        With `in_background`, returns once the state is copied; `commit_if_written` completes the save.
        """
        if self.saver is None:
            return
        self._wait_for_pending(self.saver)
        if self._last_saved == state.iteration:
            return
        train_state = state.to_json(self.run) | {"learning_rate": self.trainer.schedule.to_json()}
        if loader is not None:
            train_state["data"] = loader.state()
        self._progress.record_save_start(state)
        self.status.update(state="saving")
        self.reporter.note(f"saving checkpoint at iteration {state.iteration:7d} to {self.config.save}")
        texts = {"run.yaml": self.run.run_yaml}
        with self.trainer.optimizer.unquantized_weights():
            tensors = saved_tensors(self.trainer, optimizer=self.config.save_optim)
            self._refuse_nonfinite(tensors, f"the checkpoint of iteration {state.iteration}")
            if in_background:
                self._record_saved(self.saver.start(state.iteration, tensors, train_state, texts=texts))
            elif self.saver.save(state.iteration, tensors, train_state, texts=texts) is not None:
                self._record_saved(self.saver.last)
        self.status.update(state="running")

    def _wait_for_pending(self, saver: CheckpointSaver) -> None:
        """Waits for the asynchronous save in progress, if any, and completes it."""
        if saver.pending is not None:
            self.reporter.note(f"  waiting for the checkpoint of iteration {saver.pending:7d}, which is being written")
            self._record_saved(saver.wait())

    def _record_saved(self, saved: SavedCheckpoint | None) -> None:
        """Records a completed checkpoint in the progress log and in status.json; no-op if the save failed."""
        if saved is None or saved.path is None:
            return
        self._last_saved = saved.iteration
        self._progress.record_saved(saved.iteration)
        self.status.update(last_checkpoint=saved.iteration)
        self.reporter.note(
            f"  successfully saved checkpoint from iteration {saved.iteration:7d} to {saved.path} "
            f"in {saved.seconds:.1f} s: {num_bytes_text(saved.num_bytes)}, written at "
            f"{num_bytes_text(saved.num_bytes / max(saved.write_seconds, 1e-9))}/s; "
            f"training waited {saved.blocked_seconds:.2f} s"
        )
        self._warn_of_grace(saved.seconds)

    def _warn_of_grace(self, seconds: float) -> None:
        """Warns once if a save takes longer than launchers wait between a signal and SIGKILL."""
        if self.launcher is None or seconds < _GRACE_SECONDS:
            return
        remedy = _LONGER_GRACE.get(self.launcher, "let the launcher wait for {0} s").format(math.ceil(2 * seconds))
        self.launcher = None
        self.reporter.note(
            f"  a checkpoint after a signal takes {seconds:.0f} s, but most launchers kill the run "
            f"{_GRACE_SECONDS:.0f} s after the signal: {remedy}"
        )

    def _export(self, state: TrainState) -> None:
        if self._exports is not None:
            with self.trainer.optimizer.unquantized_weights():
                tensors = saved_tensors(self.trainer, optimizer=False)
                self._refuse_nonfinite(tensors, f"the export of iteration {state.iteration}")
                self._exports.save(state.iteration, tensors)

    def _refuse_nonfinite(self, tensors: Mapping[str, TensorShard], what: str) -> None:
        """Raises NumericsProblem on all ranks if a tensor of any rank is not finite. Collective."""
        boxes = [(key, box.data) for key, tensor in tensors.items() for box in tensor.boxes]
        finite = [(key, all_finite(data)) for key, data in boxes if data.is_floating_point()]
        bad = [key for key, is_finite in finite if not is_finite]
        # collective over world: names of non-finite tensors, usually none
        every = sorted({key for names in gather_objects(bad, self._context.group("world")) for key in names})
        if every:
            raise NumericsProblem(
                f"{what} was not written, because {len(every)} of its tensors contain non-finite values; "
                f"{self._newest()}:\n  {listed(every)}"
            )

    def _restore_from(self, source: CheckpointSource, loader: TrainLoader | None) -> TrainState:
        with self.trainer.optimizer.unquantized_weights():
            return self._restore_weights(source, loader)

    def _restore_weights(self, source: CheckpointSource, loader: TrainLoader | None) -> TrainState:
        trainer, say = self.trainer, self.reporter.note
        if self._upcycles(source):
            granularity = self.config.moe_upcycling_granularity
            load_upcycled(source, granularity, trainer.model, self._context, say=say)
            trainer.after_restore(with_optimizer=False)
            return TrainState()
        if source.is_hugging_face:
            folder = Path(source.location.removeprefix(HUGGING_FACE))
            for note in load_hf(folder, trainer.model, self.run.model, self._context.group("pp")):
                say(note)
            trainer.after_restore(with_optimizer=False)
            say(f"loaded the weights of {folder}; training starts at iteration 0")
            return TrainState()
        tensors = saved_tensors(trainer, optimizer=True)
        loaded = load_checkpoint(source, tensors, self._context, say=say, check_state=check_train_state)
        if self.saver is not None:
            self.saver.loaded_from = loaded.path
        trainer.after_restore(with_optimizer=source.optimizer)
        say(f"  successfully loaded checkpoint from {loaded.path} at iteration {loaded.iteration}")
        self._compare_config(loaded, source)
        if not source.train_state:
            return TrainState()
        # checkpoints of other programs do not contain it
        if source.optimizer and "learning_rate" in loaded.train_state:
            sizes = self.run.batch.global_batch_size, loaded.train_state.get("training", {}).get("--global-batch-size")
            trainer.schedule, differences = trainer.schedule.merged_with_checkpoint(
                loaded.train_state["learning_rate"], sizes
            )
            for line in differences:
                say(line)
        if loader is not None:
            for line in self._data_differences(loaded.train_state, loader):
                say(line)
        return TrainState.from_json(loaded.train_state)

    def _compare_config(self, loaded: LoadedCheckpoint, source: CheckpointSource) -> None:
        """Reports changed training settings. Raises CheckpointProblem if the model differs, but with --finetune only
        reports the differences."""
        model, training = config_differences(loaded.train_state, self.run)
        if model and source.train_state:
            raise CheckpointProblem(
                f"the model flags describe another model than the weights in {loaded.path}; give the checkpoint's "
                f"values (see its run.yaml), or --finetune to start from its weights:\n  {listed(model)}"
            )
        resumed = source.train_state and loaded.iteration > 0
        for line in [*model, *(training if resumed else ())]:
            self.reporter.note(f"differs from the checkpoint: {line}")

    def _upcycles(self, source: CheckpointSource) -> bool:
        """True if `source` is the dense model to upcycle, not a checkpoint of this run."""
        return self.config.moe_use_upcycling and source.origin != "--save"

    def _report_length(self, state: TrainState) -> None:
        """Reports the last iteration if Megatron-LM would end at another one (possible only with --train-samples)."""
        samples, last = self.run.loop.train_samples, state.last_iteration(self.run)
        megatron_last = last if samples is None else self.run.batch.megatron_steps_for(samples)
        if megatron_last != last:
            self.reporter.note(
                f"the run ends at iteration {last}, with the last full batch of {samples} samples; Megatron-LM would "
                f"end at iteration {megatron_last}, because it uses only the current batch sizes"
            )

    def _data_differences(self, saved: dict, loader: TrainLoader) -> Iterator[str]:
        """Yields lines about changed data and batch size. Raises CheckpointProblem if the sequence length changed."""
        then, now = saved["seq_length"], self.run.seq_length
        if then != now:
            raise CheckpointProblem(
                f"the checkpoint was trained on sequences of {then} tokens, this run has --seq-length {now}: the order "
                f"of the samples would change; give --seq-length {then}, or --finetune to start from its weights"
            )
        if "data" in saved:
            yield from _differences(saved["data"], loader.state())
        size = self.run.batch.size_at(saved["state"]["consumed_samples"])
        saved_size = saved.get("global_batch_size", size)
        if size != saved_size:
            yield (
                f"the next step has {size} sequences ({size * now:,} tokens), with the checkpoint's settings "
                f"{saved_size} ({saved_size * now:,} tokens); the learning rate continues by samples"
            )


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yields lines about the differences between the loader states of a checkpoint (`then`) and of this run (`now`).

    Older checkpoints, which lack a tokenizer, are valid. Raises CheckpointProblem if the end-of-document id differs.
    """
    if then["fingerprint"] != now["fingerprint"]:
        yield (
            "the data or its sample order is not that of the checkpoint (files, blend, split, seed or number of "
            "samples changed): samples may repeat or be skipped"
        )
    earlier = then.get("contents", {})
    for prefix, content in now["contents"].items():
        if earlier.get(prefix, content) != content:
            yield (
                f"the content of {prefix}.bin is not that of the checkpoint (then {earlier[prefix]}; now {content}): "
                f"training continues with other tokens; restore the file to continue with the same ones"
            )
    if then.get("tokenizer", now["tokenizer"]) == now["tokenizer"]:
        return
    if then["end_of_document"] != now["end_of_document"]:
        raise CheckpointProblem(
            f"the checkpoint was trained with the tokenizer {then['tokenizer']}, which ends documents with id "
            f"{then['end_of_document']}; this run's, {now['tokenizer']}, with id {now['end_of_document']}: give the "
            f"tokenizer of the checkpoint, or --finetune to start from its weights"
        )
    yield (
        f"the tokenizer is not that of the checkpoint (then {then['tokenizer']}, now {now['tokenizer']}): token ids "
        "may stand for other text"
    )


def _divides(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0


def saved_tensors(trainer: Trainer, *, optimizer: bool) -> dict[str, TensorShard]:
    """This rank's part of a checkpoint, by key: weights, buffers and optimizer state.

    Tensors are views, except low-precision optimizer state, which is converted in host memory
    (`Optimizer.named_state`). Call it inside `Optimizer.unquantized_weights`, because weights that are sharded or
    stored in FP8 or FP4 are otherwise not in the parameters. `optimizer`: whether optimizer state is included.
    """
    trainer.optimizer.finish_gather()
    tensors = model_tensors(trainer.model)
    if optimizer:
        tensors[tensor_key("optimizer", "step_count")] = TensorShard.whole(trainer.optimizer.step_count)
        if trainer.loss_scaler is not None:
            tensors[tensor_key("optimizer", "loss_scale")] = TensorShard.whole(trainer.loss_scaler.state)
        for state in trainer.optimizer.named_state():
            key = tensor_key(state.kind, state.name)
            part = TensorShard.part(state.global_shape, state.boxes, state.dim, state.data, state.start)
            # A parameter whose state is partly in host memory has two entries.
            before = tensors[key].boxes if key in tensors else ()
            tensors[key] = TensorShard(part.shape, (*before, *part.boxes))
    return tensors


def model_tensors(model: nn.Module) -> dict[str, TensorShard]:
    """This rank's part of the weights, and the complete (unsharded) buffers, by key."""
    tensors = {name: TensorShard.whole(value.detach()) for name, value in model.state_dict().items()}
    for name, parameter in named_parameters(model):
        dim, values = sharded_dim(parameter.meta) or 0, parameter.detach().view(-1)
        tensors[name] = TensorShard.part(parameter.global_shape, parameter.boxes, dim, values)
    return {tensor_key("model", name): tensor for name, tensor in tensors.items()}
