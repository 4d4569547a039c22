"""Cases of the output rules (arguments/checks/output.py)."""

from tests.helpers.check_cases import Case

FAULTS_ALLOWED = {"MEGATRON_MOE_ALLOW_FAULTS": "1"}

CASES = (
    Case(
        "save_needs_interval",
        "--save x",
        "--save without --save-interval",
        "--save x --save-interval 1",
        "--save-interval",
    ),
    Case(
        "retain_interval_is_multiple_of_save_interval",
        "--save-retain-interval 150",
        "--save-retain-interval 150 is not a multiple of --save-interval 100",
        "--save-retain-interval 200",
    ),
    Case(
        "ckpt_step_needs_folder",
        "--ckpt-step 3",
        "without a checkpoint directory",
        "--ckpt-step 3 --load x",
        "--run-dir",
    ),
    Case(
        "missing_checkpoint_exit_needs_load",
        "--exit-on-missing-checkpoint",
        "without a checkpoint directory",
        "--exit-on-missing-checkpoint --load x",
    ),
    Case(
        "hf_export_has_folder_and_config",
        "--save-hf-interval 5",
        "without a directory to write to",
        "--save-hf-interval 5 --run-dir x --load hf:y",
        "--save or --run-dir",
    ),
    Case(
        "hf_export_has_folder_and_config",
        "--save-hf-interval 5 --run-dir x --load y",
        "without a config.json",
        "--save-hf-interval 5 --run-dir x --save-hf-config y",
        "--save-hf-config",
    ),
    Case("wandb_run_has_name", "--wandb-project p", "without a run name", "--wandb-project p --wandb-exp-name n"),
    Case(
        "kernel_requests_are_pairs",
        "--kernel-per-op rms_norm=reference rope=",
        "rope= is not a pair",
        "--kernel-per-op rms_norm=reference",
    ),
    Case(
        "injected_faults_are_valid", "--inject a@0:3", "unknown fault 'a'", "--inject kill@0:3", environ=FAULTS_ALLOWED
    ),
    Case(
        "injected_faults_are_valid", "--inject kill@1:3", "for rank 1 of 1", "--inject kill@0:3", environ=FAULTS_ALLOWED
    ),
    Case(
        "profiled_range_is_not_empty",
        "--profile --profile-step-start 12",
        "--profile-step-end 12 is not after --profile-step-start 12",
        "--profile --profile-step-start 11",
    ),
    Case(
        "profile_needs_run_dir",
        "--profile --use-pytorch-profiler",
        "without --run-dir",
        "--profile",
        without="--run-dir --save-interval",
    ),
)
