"""What only a cluster has: its files, its libraries, its hardware. Rewritten before anything is shrunk."""

from arguments.proxy.draft import Draft

ITERATIONS = 5

_TEXT = (
    *("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path"),
    *("per_split_data_args_path", "data_cache_path", "multiple_validation_sets"),
)
_TOKENIZER = (
    *("tokenizer_model", "vocab_file", "merge_file", "tiktoken_pattern", "tokenizer_special_tokens"),
    *("tiktoken_num_special_tokens", "null_tokenizer_eod_id", "null_tokenizer_pad_id", "trust_remote_code"),
)
_FOLDERS = (
    *("run_dir", "save", "load", "pretrained_checkpoint", "ckpt_step", "exit_on_missing_checkpoint", "save_interval"),
    *("tensorboard_dir", "wandb_project", "wandb_exp_name", "wandb_entity", "wandb_save_dir"),
)
_LENGTHS = (
    *("train_samples", "rampup_batch_size", "step_batch_size_schedule", "decrease_batch_size_if_needed"),
    *("lr_decay_iters", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "exit_interval"),
    *("exit_duration_in_mins", "iterations_to_skip", "skip_train"),
)
NEEDLESS = frozenset((*_TEXT, *_TOKENIZER, *_FOLDERS, *_LENGTHS, "tokenizer_type", "train_iters", "mock_data"))
"""Flags whose values the proxy does not need, so that they may name variables that are not set here."""


def on_this_machine(draft: Draft) -> None:
    """Random tokens, no folders, a run of a few iterations, and nothing that needs other hardware."""
    _random_tokens(draft)
    for name in _FOLDERS:
        draft.default(name, "the run at full size owns its folders")
    if "save" in draft.pinned:
        draft.put("save_interval", ITERATIONS, "a checkpoint at the end of the run")
    _short_run(draft)
    _other_hardware(draft)


def _random_tokens(draft: Draft) -> None:
    draft.put("mock_data", True, "random tokens")
    for name in (*_TEXT, *_TOKENIZER):
        draft.default(name, "random tokens")
    if draft.value("split") is not None:
        draft.default("split", "random tokens")
    draft.put("tokenizer_type", "NullTokenizer", "random tokens")
    draft.put("num_workers", 0, "no time to start them")
    if draft.value("dataloader_type") == "external":
        draft.default("dataloader_type", "random tokens")
    if draft.value("moe_use_upcycling"):
        draft.default("moe_use_upcycling", "there is no dense checkpoint of this size")
        draft.default("moe_upcycling_granularity", "there is no dense checkpoint of this size")


def _short_run(draft: Draft) -> None:
    reason = f"a run of {ITERATIONS} iterations"
    for name in _LENGTHS:
        draft.default(name, reason)
    draft.put("train_iters", ITERATIONS, reason)
    draft.lower("lr_warmup_iters", 1, reason)
    if draft.value("lr_decay_style") == "WSD":
        draft.put("lr_wsd_decay_iters", 2, reason)
    else:
        draft.default("lr_wsd_decay_iters", reason)
    draft.lower("eval_interval", ITERATIONS, reason)
    if draft.value("eval_iters") != 0:
        draft.put("eval_iters", 1, reason)
    draft.put("log_interval", 1, reason)


def _other_hardware(draft: Draft) -> None:
    draft.default("device", "the machine at hand")
    for name in ("kernel_backend", "kernel_per_op"):
        draft.default(name, "kernels for the machine at hand")
    for name in ("cuda_graph_impl", "cuda_graph_modules"):
        draft.default(name, "graphs only replay what a proxy computes")
    if draft.value("moe_token_dispatcher_type") == "flex":
        draft.put("moe_token_dispatcher_type", "alltoall", "the libraries behind flex need GPUs")
    if draft.value("fp16"):
        draft.put("fp16", False, "needs loss scaling")
        draft.put("bf16", True, "instead of fp16")
    double = draft.pinned.get("fp64")
    for name, flag in draft.settings.registry.flags.items():
        if flag.group == "precision" and double is not None and double.value:
            draft.default(name, "double precision")
        value = draft.value(name)
        hardware = flag.group == "precision" or flag.declaration.harmless
        if draft.settings.known(name) and not flag.available(value) and hardware:
            draft.default(name, "not available here")
