"""Cases of the optimizer rules (arguments/checks/optimizer.py)."""

from tests.helpers.check_cases import Case

PRECISION_AWARE = "--bf16 --use-precision-aware-optimizer"

CASES = (
    Case(
        "state_dtypes_need_precision_aware_optimizer",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
        "--exp-avg-dtype bf16, --exp-avg-sq-dtype fp8 without --use-precision-aware-optimizer",
        f"{PRECISION_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
    ),
    Case(
        "narrow_main_dtypes_need_bf16",
        "--no-bf16 --use-precision-aware-optimizer --main-params-dtype fp16",
        "--main-params-dtype fp16 with wider parameters",
        f"{PRECISION_AWARE} --main-params-dtype fp16 --main-grads-dtype bf16",
    ),
    Case(
        "fp64_has_no_narrow_moments",
        "--fp64 --use-precision-aware-optimizer --exp-avg-dtype fp16",
        "--fp64 with moments in fp16 and fp32",
        "--fp64 --use-precision-aware-optimizer",
    ),
    Case(
        "main_grads_have_one_dtype",
        f"{PRECISION_AWARE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
        "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32",
        f"{PRECISION_AWARE} --main-grads-dtype bf16",
    ),
    Case(
        "scaled_state_needs_nan_check",
        f"{PRECISION_AWARE} --main-params-dtype fp16 --exp-avg-dtype fp8 --no-check-for-nan-in-loss-and-grad",
        "optimizer state in fp16 and fp8, with a scale per block of 128",
        f"{PRECISION_AWARE} --exp-avg-dtype bf16 --no-check-for-nan-in-loss-and-grad",
    ),
    Case(
        "one_optimizer_offload",
        "--optimizer-cpu-offload --chunked-optimizer-state-offload",
        "--optimizer-cpu-offload updates the state on the CPU",
        "--chunked-optimizer-state-offload --optimizer-state-offload-chunk-size-mb 64",
    ),
    Case(
        "fractions_are_at_most_one",
        "--activation-offload-fraction 2 --optimizer-cpu-offload --optimizer-offload-fraction 1.5",
        "--activation-offload-fraction 2, --optimizer-offload-fraction 1.5 is above 1",
        "--activation-offload-fraction 1 --optimizer-cpu-offload --optimizer-offload-fraction 1",
    ),
    Case(
        "torch_cpu_optimizer_excludes_fp64",
        "--fp64 --optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload",
        "--fp64 with torch's CPU optimizer",
        "--optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    ),
    Case(
        "full_iteration_excludes_optimizer_offload",
        "--cuda-graph-impl full_iteration --offload-optimizer-states",
        "--cuda-graph-impl full_iteration with --chunked-optimizer-state-offload",
        "--offload-optimizer-states",
    ),
    Case(
        "param_gather_overlap_needs_sharded_optimizer",
        "--overlap-param-gather --overlap-grad-reduce",
        "--overlap-param-gather without --use-distributed-optimizer",
        "--overlap-param-gather --overlap-grad-reduce --use-distributed-optimizer",
    ),
    Case(
        "param_gather_overlap_needs_sharded_optimizer",
        "--overlap-param-gather --use-distributed-optimizer",
        "--overlap-param-gather without --overlap-grad-reduce",
        "--overlap-grad-reduce --use-distributed-optimizer",
    ),
    Case(
        "optimizer_overlap_excludes_offload",
        "--overlap-optimizer-step --chunked-optimizer-state-offload --optimizer-state-offload-fraction 0.5",
        "--overlap-optimizer-step with --chunked-optimizer-state-offload",
        "--overlap-optimizer-step",
    ),
    Case(
        "optimizer_overlap_needs_param_gather_overlap",
        "--overlap-optimizer-step --use-distributed-optimizer",
        "but without --overlap-param-gather",
        "--overlap-optimizer-step --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    Case(
        "bucket_size_given_once",
        "--ddp-bucket-size 1000 --ddp-num-buckets 2",
        "--ddp-bucket-size 1000 and --ddp-num-buckets 2",
        "--ddp-num-buckets 2",
    ),
    Case(
        "per_token_loss_excludes_averaging",
        "--ddp-average-in-collective --calculate-per-token-loss",
        "--ddp-average-in-collective with --calculate",
        "--ddp-average-in-collective",
    ),
    Case(
        "fp32_accumulation_needs_distributed_optimizer",
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "without --use-distributed-optimizer",
        "--ddp-reduce-scatter-with-fp32-accumulation --use-distributed-optimizer",
    ),
    Case(
        "bf16_grad_reduce_needs_bf16",
        "--no-bf16 --grad-reduce-in-bf16",
        "--grad-reduce-in-bf16 with wider parameters",
        "--bf16 --grad-reduce-in-bf16",
    ),
)
