"""Bugs of saving and loading: what is left out, what is written too late, what is believed."""

from tests.mutants.bug import Bug

BACKGROUND = "tests/checkpoint/test_async_save.py"
SAVE = "tests/checkpoint/test_save.py"
LOAD = "tests/checkpoint/test_load.py"

SAVING = (
    Bug(
        name="a save in the background reads weights that are being trained",
        file="megatron_moe/checkpoint/async_save.py",
        old="yield copy.copy_(source.detach(), non_blocking=True)",
        new="yield source.detach()",
        select=(f"{BACKGROUND}::test_every_file_is_that_of_a_plain_save_although_training_went_on",),
        reason="a checkpoint of no iteration at all; every checksum fits",
    ),
    Bug(
        name="a run goes on to its next save without completing the last one",
        file="megatron_moe/train/checkpointing.py",
        old="        self._wait_for_pending(self._saver)\n",
        new="",
        select=("tests/train/test_resume_table.py",),
        reason="the end of a run loses the checkpoint that is being written",
    ),
    Bug(
        name="a checkpoint is committed although a part of a tensor was not written",
        file="megatron_moe/checkpoint/save.py",
        old="            decode(content)  # the boxes of all ranks cover every tensor exactly once\n",
        new="",
        select=(f"{SAVE}::test_boxes_that_do_not_make_up_a_tensor_are_no_checkpoint",),
        reason="completeness is found out when the checkpoint is needed",
    ),
    Bug(
        name="the last row of what a rank holds is not saved",
        file="megatron_moe/checkpoint/tensor_shards.py",
        old="    while start < end:\n        first, begin",
        new="    while start < end - row:\n        first, begin",
        select=(f"{SAVE}::test_any_range_of_a_part_of_a_tensor_becomes_boxes",),
        reason="an off-by-one in the cut of a shard",
    ),
    Bug(
        name="every rank writes all that it holds",
        file="megatron_moe/checkpoint/save.py",
        old="if next(each) not in lower)",
        new="if next(each) is not None)",
        select=(f"{SAVE}::test_every_rank_writes_its_boxes_once_into_a_file_of_its_own",),
        reason="a checkpoint as large as there are copies",
    ),
    Bug(
        name="one rank's failure to write is not heard of",
        file="megatron_moe/checkpoint/save.py",
        old="            error = _first_error(results)\n",
        new="            error = _first_error(results[:1])\n",
        select=(f"{BACKGROUND}::test_what_fails_in_the_thread_is_told_counted_and_leaves_nothing",),
        reason="a rename without the file of that rank",
    ),
)

LOADING = (
    Bug(
        name="a tensor of the checkpoint that the run does not know is passed over",
        file="megatron_moe/checkpoint/load.py",
        old="for key in saved if key not in wanted and digest(key) not in known]",
        new="for key in saved if key not in wanted and not known]",
        select=(f"{LOAD}::test_what_does_not_fit_is_listed_in_full_and_no_older_checkpoint_is_tried",),
        reason="a trained expert bias is dropped by a run that forgot its flag",
    ),
    Bug(
        name="a manifest is believed about the element types of a file",
        file="megatron_moe/checkpoint/load.py",
        old="                check_header(name, head, extents.get(name, ()))\n",
        new="                pass\n",
        select=(f"{LOAD}::test_a_manifest_that_lies_about_an_element_type_is_damage",),
        reason="bits of one type are read as another",
    ),
    Bug(
        name="only the first box of a tensor is filled",
        file="megatron_moe/checkpoint/tensor_shards.py",
        old="            for destination, source in copies:\n",
        new="            for destination, source in copies[:1]:\n",
        select=(f"{LOAD}::test_any_partition_into_boxes_loads_into_any_other",),
        reason="a part of the model keeps its initial values",
    ),
)
