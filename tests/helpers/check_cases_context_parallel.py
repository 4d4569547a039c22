"""Cases of the context-parallel rules (arguments/checks/context_parallel.py)."""

from tests.helpers.check_cases import EIGHT_RANKS, Case

DYNAMIC = "--dynamic-context-parallel --max-seqlen-per-dp-cp-rank 64"
CP = "--global-batch-size 32 --context-parallel-size"

CASES = (
    Case(
        "cp_divides_sequence",
        f"{CP} 4 --seq-length 124",
        "--seq-length 124 is not a multiple of 8, which 4 context-parallel ranks need",
        f"{CP} 4 --seq-length 120",
        environ=EIGHT_RANKS,
    ),
    Case(
        "cp_comm_type_matches_layers",
        f"{CP} 2 --cp-comm-type p2p a2a",
        "--cp-comm-type has 2 values for 4 layers",
        f"{CP} 2 --cp-comm-type p2p a2a all_gather allgather",
        environ=EIGHT_RANKS,
    ),
    Case(
        "hierarchical_cp_sizes_multiply_to_cp",
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
        "the two levels of 4 context-parallel ranks are 2 x 4",
        f"{CP} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "hierarchical_cp_sizes_multiply_to_cp",
        f"{CP} 4 --cp-comm-type a2a+p2p",
        "the two levels of 4 context-parallel ranks are not given",
        f"{CP} 4 --cp-comm-type p2p",
        environ=EIGHT_RANKS,
    ),
    Case(
        "a2a_ranks_divide_heads",
        f"{CP} 8 --cp-comm-type a2a",
        "4 heads cannot be divided among 8 ranks",
        f"{CP} 4 --cp-comm-type a2a",
        environ=EIGHT_RANKS,
    ),
    Case(
        "a2a_ranks_divide_heads",
        f"{CP} 2 --cp-comm-type a2a --num-attention-heads 6 --num-query-groups 3 --kv-channels 32",
        "3 query groups and 2 ranks that exchange heads: neither divides the other",
        f"{CP} 2 --cp-comm-type a2a --num-attention-heads 6 --num-query-groups 2 --kv-channels 32",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_cp_has_token_limit",
        f"{CP} 2 --hybrid-context-parallel",
        "without --max-seqlen-per-dp-cp-rank",
        f"{CP} 2 --hybrid-context-parallel --max-seqlen-per-dp-cp-rank 64",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_cp_is_power_of_two",
        f"--context-parallel-size 3 --seq-length 126 {DYNAMIC}",
        "3 context-parallel ranks are not a power of two",
        f"--context-parallel-size 4 --seq-length 128 {DYNAMIC} --global-batch-size 24",
        environ={**EIGHT_RANKS, "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "12"},
    ),
    Case(
        "dynamic_cp_is_not_hierarchical",
        f"{CP} 4 {DYNAMIC} --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
        "but --hybrid-context-parallel varies it",
        f"{CP} 4 {DYNAMIC} --cp-comm-type a2a --hierarchical-context-parallel-sizes 2 2",
        environ=EIGHT_RANKS,
    ),
    Case(
        "dynamic_cp_excludes_seq_aux_loss",
        f"{CP} 4 {DYNAMIC} --moe-router-load-balancing-type seq_aux_loss",
        "counts the tokens of a sequence over all context-parallel ranks",
        f"{CP} 4 {DYNAMIC} --moe-router-load-balancing-type aux_loss",
        environ=EIGHT_RANKS,
    ),
)
