"""Selection of the checkpoint folder, and of the parts of a checkpoint, that a run loads."""

from pathlib import Path
from typing import Any

import pytest

from megatron_moe.checkpoint.load import CheckpointSource, find_checkpoint
from megatron_moe.checkpoint.save import CheckpointSaver
from megatron_moe.config.checkpoint import CheckpointConfig
from megatron_moe.config.exit_codes import CheckpointProblem
from megatron_moe.config.parallel import ParallelConfig
from megatron_moe.parallel.context import ParallelContext
from tests.helpers.checkpoint_files import load_some, saved_folder, some_tensors, whole
from tests.helpers.ranks import on_threads

ONE = ParallelContext.single()


def choose(said: list[str] | None = None, **config: Any) -> CheckpointSource | None:
    return find_checkpoint(CheckpointConfig(**config), ONE, say=(said if said is not None else []).append)


def test_a_run_without_checkpoints_starts_from_random_weights(tmp_path: Path) -> None:
    assert choose() is None
    assert choose(save=tmp_path / "none") is None


def test_the_runs_own_newest_checkpoint_comes_before_load(tmp_path: Path) -> None:
    own, other = saved_folder(tmp_path / "own", 10, 20), saved_folder(tmp_path / "other", 90)
    source = choose(save=own, load=str(other))
    assert (source.origin, [c.iteration for c in source.candidates]) == ("--save", [20, 10])


def test_a_requested_step_has_the_highest_precedence(tmp_path: Path) -> None:
    own, other = saved_folder(tmp_path / "own", 10, 20), saved_folder(tmp_path / "other", 10, 90)
    source = choose(save=own, load=str(other), ckpt_step=10)
    assert (source.origin, source.location) == ("--ckpt-step", str(other))
    assert [c.iteration for c in source.candidates] == [10]


def test_load_comes_before_pretrained(tmp_path: Path) -> None:
    load_, pretrained = saved_folder(tmp_path / "load", 10), saved_folder(tmp_path / "pretrained", 90)
    source = choose(save=tmp_path / "new", load=str(load_), pretrained_checkpoint=str(pretrained))
    assert source.origin == "--load" and source.optimizer and source.train_state
    said: list[str] = []
    source = choose(said, save=tmp_path / "new", load=str(tmp_path / "empty"), pretrained_checkpoint=str(pretrained))
    assert source.origin == "--pretrained-checkpoint" and not source.optimizer and not source.train_state
    assert len(said) == 1
    assert said[0].startswith(f"--load {tmp_path / 'empty'}, which does not exist, holds no checkpoint")
    assert said[0].endswith(": --pretrained-checkpoint is used")


def test_finetune_applies_to_load_and_a_restart_resumes_in_full(tmp_path: Path) -> None:
    own, other = tmp_path / "own", saved_folder(tmp_path / "other", 90)
    flags = {"save": own, "load": str(other), "finetune": True, "load_optim": False}
    first = choose(**flags)
    assert (first.origin, first.optimizer, first.train_state) == ("--load", False, False)
    saved_folder(own, 10)
    second = choose(**flags)
    assert (second.origin, second.optimizer, second.train_state) == ("--save", True, True)


def test_finetune_into_the_folder_it_loads_from_is_rejected(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    with pytest.raises(CheckpointProblem, match="--finetune starts at iteration 0, .* give another --save folder"):
        choose(save=tmp_path, load=str(tmp_path), finetune=True)


def test_flags_apply_to_the_save_folder_if_it_is_also_the_load_folder(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    source = choose(save=tmp_path, load=str(tmp_path), load_optim=False)
    assert (source.origin, source.optimizer, source.train_state) == ("--save", False, True)


def test_a_run_that_saves_no_optimizer_resumes_without_it(tmp_path: Path) -> None:
    saver = CheckpointSaver(tmp_path, ONE, say=lambda line: None)
    weights = {key: t for key, t in whole(some_tensors(10)).items() if key.startswith("model.")}
    saver.save(10, weights, {"iteration": 10})
    loaded, tensors = load_some(tmp_path, save_optim=False)
    assert loaded.iteration == 10 and not tensors["master.embedding.weight"].any()


def test_a_run_that_no_longer_saves_its_optimizer_resumes_with_it(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    (tmp_path / "iter_0000020" / "manifest.json").write_text("damaged")
    loaded, tensors = load_some(tmp_path, save_optim=False)
    assert loaded.iteration == 10 and tensors["master.embedding.weight"].all()


def test_fresh_ignores_checkpoints_in_the_save_folder(tmp_path: Path) -> None:
    own, other = saved_folder(tmp_path / "own", 10), saved_folder(tmp_path / "other", 5)
    assert choose(save=own, fresh=True) is None
    assert choose(save=own, load=str(own), fresh=True) is None
    assert choose(save=own, load=str(other), fresh=True).origin == "--load"


def test_load_may_name_one_checkpoint_itself(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10, 20)
    source = choose(load=str(tmp_path / "iter_0000010"))
    assert [c.iteration for c in source.candidates] == [10]


@pytest.mark.parametrize("config", [{}, {"finetune": True}, {"load_optim": False}])
def test_loading_an_empty_folder_is_reported(config: dict, tmp_path: Path) -> None:
    said: list[str] = []
    assert choose(said, load=str(tmp_path), **config) is None
    looked = f"(looked for iter_NNNNNNN in {tmp_path} or {tmp_path / 'checkpoints'})"
    assert said == [f"--load {tmp_path} holds no checkpoint {looked}: starting from random weights"]


@pytest.mark.parametrize(
    ("flag", "config"),
    [
        ("--exit-on-missing-checkpoint", {"exit_on_missing_checkpoint": True}),
        ("--skip-train", {"skip_train": True}),
        ("--moe-use-upcycling", {"moe_use_upcycling": True, "load_optim": False}),
    ],
)
def test_flags_that_require_a_checkpoint_reject_an_empty_folder(flag: str, config: dict, tmp_path: Path) -> None:
    with pytest.raises(CheckpointProblem, match=f"{tmp_path} holds no checkpoint .* required by .*{flag}"):
        choose(load=str(tmp_path), **config)


def test_a_run_folder_selects_its_checkpoints(tmp_path: Path) -> None:
    run = str(saved_folder(tmp_path / "run" / "checkpoints", 10, 20).parent)
    assert [c.iteration for c in choose(load=run).candidates] == [20, 10]
    assert [c.iteration for c in choose(load=run, ckpt_step=10).candidates] == [10]
    assert [c.iteration for c in choose(pretrained_checkpoint=run).candidates] == [20, 10]
    with pytest.raises(CheckpointProblem, match="is the folder from which it loads"):
        choose(load=run, save=Path(run) / "checkpoints", finetune=True)


def test_an_evaluation_loads_weights_only(tmp_path: Path) -> None:
    own, other = saved_folder(tmp_path / "own", 10), saved_folder(tmp_path / "other", 90)
    for config in ({"save": own}, {"load": str(other)}, {"load": str(other), "ckpt_step": 90}):
        source = choose(skip_train=True, **config)
        assert not source.optimizer and source.train_state


def test_missing_pretrained_checkpoint_and_step_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointProblem, match="--pretrained-checkpoint .* holds no checkpoint"):
        choose(pretrained_checkpoint=str(tmp_path))
    with pytest.raises(CheckpointProblem, match="--ckpt-step 5 needs --load or --save"):
        choose(ckpt_step=5)


def test_hugging_face_folders_are_selected_by_prefix(tmp_path: Path) -> None:
    source = choose(load="hf:/models/tiny", save=tmp_path / "new")
    assert source.is_hugging_face and source.location == "hf:/models/tiny" and source.candidates == ()
    assert choose(pretrained_checkpoint="hf:/models/tiny").is_hugging_face
    own = saved_folder(tmp_path / "own", 10)
    assert choose(load="hf:/models/tiny", save=own).origin == "--save"


def test_a_stale_tracker_is_ignored_with_one_line(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("99")
    said: list[str] = []
    assert choose(said, load=str(tmp_path)).candidates[0].iteration == 10
    assert len(said) == 1 and said[0].startswith("ignored ") and "says '99'" in said[0]


def test_all_ranks_get_the_same_source_or_error(tmp_path: Path) -> None:
    saved_folder(tmp_path, 10)

    def answers(context: ParallelContext) -> tuple:
        source = find_checkpoint(CheckpointConfig(save=tmp_path), context)
        with pytest.raises(CheckpointProblem) as problem:
            find_checkpoint(CheckpointConfig(pretrained_checkpoint=str(tmp_path / "none")), context)
        return source, str(problem.value)

    first, second = on_threads(ParallelConfig(world_size=2), answers)
    assert first == second
