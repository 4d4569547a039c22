"""Cases of the tensor-parallel rules (arguments/checks/tensor_parallel.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, TP2, Case

TP4 = "--tensor-model-parallel-size 4 --sequence-parallel"
TP8 = "--tensor-model-parallel-size 8 --sequence-parallel"

CASES = (
    Case(
        "tp_divides_heads",
        f"{TP2} --num-attention-heads 3 --kv-channels 64",
        "3 heads cannot be divided among 2 tensor-parallel ranks",
        TP2,
        environ=EIGHT_RANKS,
    ),
    Case(
        "tp_divides_query_groups",
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 3",
        "3 query groups and 4 tensor-parallel ranks: neither number divides the other",
        f"{TP4} --num-attention-heads 12 --kv-channels 64 --num-query-groups 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "tp_divides_shared_kv_channels",
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 2",
        "4 channels of keys and values do not divide among 8 tensor-parallel ranks",
        f"{TP8} --num-attention-heads 8 --num-query-groups 1 --kv-channels 4",
        environ=EIGHT_RANKS,
    ),
    Case(
        "tp_divides_dense_width",
        f"{TP2} --ffn-hidden-size 511",
        "511 feed-forward channels cannot be divided among 2",
        f"{TP2} --ffn-hidden-size 510",
        environ=EIGHT_RANKS,
    ),
    Case(
        "tp_divides_shared_expert",
        f"{TP2} --moe-shared-expert-intermediate-size 63",
        "shared experts of width 63 cannot be divided among 2",
        f"{TP2} --moe-shared-expert-intermediate-size 62",
        environ=EIGHT_RANKS,
    ),
    Case(
        "unpadded_vocab_needs_tp1",
        f"{TP2} --disable-pad-vocab-size",
        "a vocabulary without padding may not be divisible among 2",
        f"{TP2} --disable-pad-vocab-size --padded-vocab-size 1002",
        environ=EIGHT_RANKS,
    ),
    Case(
        "experts_need_sequence_parallel",
        "--tensor-model-parallel-size 2",
        "experts and 2 tensor-parallel ranks without sequence parallelism",
        TP2,
        environ=EIGHT_RANKS,
    ),
    Case(
        "tp_divides_sequence",
        f"{TP2} --seq-length 127",
        "--seq-length 127 cannot be divided among 2",
        f"{TP2} --seq-length 126",
        environ=EIGHT_RANKS,
    ),
)
