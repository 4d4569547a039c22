"""Command lines that break a rule about the optimizer's state, and ones that barely do not."""

from tests.helpers.check_cases_parallel import Case

_AWARE = "--bf16 --use-precision-aware-optimizer"

STATE_CASES = (
    Case(
        "formats_belong_to_the_precision_aware_optimizer",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
        "--exp-avg-dtype bf16, --exp-avg-sq-dtype fp8 without --use-precision-aware-optimizer",
        f"{_AWARE} --exp-avg-dtype bf16 --exp-avg-sq-dtype fp8",
    ),
    Case(
        "formats_are_of_bf16_parameters",
        "--no-bf16 --use-precision-aware-optimizer --main-params-dtype fp16",
        "--main-params-dtype fp16 for parameters in a wider format",
        f"{_AWARE} --main-params-dtype fp16 --main-grads-dtype bf16",
    ),
    Case(
        "double_precision_is_everywhere",
        "--fp64 --use-precision-aware-optimizer --exp-avg-dtype fp16",
        "--fp64 with moments in fp16 and fp32",
        "--fp64 --use-precision-aware-optimizer",
    ),
    Case(
        "gradients_have_one_format",
        f"{_AWARE} --main-grads-dtype bf16 --accumulate-allreduce-grads-in-fp32",
        "--main-grads-dtype bf16 with --accumulate-allreduce-grads-in-fp32",
        f"{_AWARE} --main-grads-dtype bf16",
    ),
    Case(
        "blocks_hold_finite_numbers",
        f"{_AWARE} --main-params-dtype fp16 --exp-avg-dtype fp8 --no-check-for-nan-in-loss-and-grad",
        "optimizer state in fp16 and fp8, whose 128 neighbours share a scale",
        f"{_AWARE} --exp-avg-dtype bf16 --no-check-for-nan-in-loss-and-grad",
    ),
    Case(
        "state_waits_in_one_way",
        "--optimizer-cpu-offload --chunked-optimizer-state-offload",
        "--optimizer-cpu-offload steps the state on the host",
        "--chunked-optimizer-state-offload --optimizer-state-offload-chunk-size-mb 64",
    ),
    Case(
        "fractions_are_at_most_one",
        "--optimizer-cpu-offload --optimizer-offload-fraction 1.5",
        "--optimizer-offload-fraction 1.5 is more than there is",
        "--optimizer-cpu-offload --optimizer-offload-fraction 1",
    ),
    Case(
        "torch_steps_in_fp32",
        "--fp64 --optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload",
        "--fp64 with torch's optimizer on the host",
        "--optimizer-cpu-offload --use-torch-optimizer-for-cpu-offload --overlap-cpu-optimizer-d2h-h2d",
    ),
    Case(
        "whole_steps_ask_no_host",
        "--cuda-graph-impl full_iteration --offload-optimizer-states",
        "--cuda-graph-impl full_iteration with --chunked-optimizer-state-offload",
        "--offload-optimizer-states",
    ),
)
