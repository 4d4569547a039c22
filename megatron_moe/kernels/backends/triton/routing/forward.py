"""Router forward: scores, group-limited top-k, weights, counts, and the sums for the auxiliary losses.

Sums for balancing losses are computed per set of tokens (`balance_sets` of `Kernels.route`). The grid has few programs.
Each processes several tiles of tokens of one set and computes:

- Top-k choices, one maximum after the other. Scores are mapped to integers of the same order, for which a warp
  reduction is one instruction. A second reduction selects the lowest id among ties, like a stable sort.
- Counts, added by atomics to one zeroed buffer: integer sums do not depend on the order.
- Sums over tokens: scores for balancing, squared log-sum-exps for the z loss. Floating-point sums depend on their
  order, so every program writes a partial sum, and the last program adds them in program order. Results are bitwise
  reproducible, whichever program is last.

Every program increments an atomic counter (the ticket, stored after the counts), which shows whether it is the last. A
barrier orders the stores of all threads of a program before its increment. The increment releases these stores at GPU
scope and acquires the stores of earlier programs. The loads of partial sums follow the increment and bypass the L1
cache (.cg), which is not coherent between SMs. No program waits for another, so deadlocks are impossible.

The columns of a tile are experts in the order of their ids, in groups (one group without group-limited routing). The
group size and the number of groups are padded to powers of two.
"""

import triton
import triton.language as tl

from megatron_moe.kernels.backends.triton.routing.scores import (
    floats_of_sortable_ints,
    load_logits,
    score,
    softmax,
    sortable_ints,
)


@triton.jit
def route_forward(
    logits_ptr, bias_ptr, given_ptr, valid_ptr, ids_ptr, probs_ptr, counts_ptr, shares_ptr, scores_ptr, z_ptr,
    num_tokens, num_experts, sets,
    BIASED: tl.constexpr, REPLAYED: tl.constexpr, MASKED: tl.constexpr, BALANCE: tl.constexpr, Z: tl.constexpr,
    TOPK: tl.constexpr, CHOICES: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr,
    SCORE: tl.constexpr, ON_LOGITS: tl.constexpr, NORMALISED: tl.constexpr, SCALING: tl.constexpr,
    EPSILON: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    WIDE: tl.constexpr, INT: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    """Router forward. `counts_ptr`: counts [1 + sets, experts] ([1, experts] without BALANCE), then the number of
    finished programs. `shares_ptr`: partial sums of scores [programs, experts], then of squared log-sum-exps."""
    plain: tl.constexpr = not (BIASED or REPLAYED or GROUP_TOPK > 0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    group_size = num_experts // NUM_GROUPS
    columns = tl.arange(0, GROUPS * SIZE)
    experts = columns // SIZE * group_size + columns % SIZE
    real = (columns % SIZE < group_size) & (experts < num_experts)
    choices = tl.arange(0, CHOICES)

    counts = tl.zeros((GROUPS * SIZE,), dtype=tl.int32)
    plain_counts = tl.zeros((GROUPS * SIZE,), dtype=tl.int32)
    sums = tl.zeros((GROUPS * SIZE,), dtype=WIDE)
    squares = tl.zeros((TOKENS,), dtype=WIDE)
    own_set, size_of_set = program % sets, num_tokens // sets
    for start in range(program // sets * TOKENS, size_of_set, programs // sets * TOKENS):
        positions = start + tl.arange(0, TOKENS)
        tokens = positions * sets + own_set
        inside = positions < size_of_set
        mask = inside
        if MASKED:
            mask = inside & (tl.load(valid_ptr + tokens, mask=inside, other=0) != 0)
        logits = load_logits(logits_ptr, tokens, mask, experts, real, num_experts, WIDE)
        if Z:
            _, logsumexp = softmax(logits)
            squares += tl.where(mask, logsumexp * logsumexp, 0.0)
        scores, shares = _scores(logits, SCORE, ON_LOGITS, EPSILON)
        if BALANCE:
            sums += tl.sum(shares, axis=0)
            if not plain:
                plain_counts += _count_plain(scores, mask, columns, real, TOPK, GROUPS * SIZE, INT, HIGHEST)

        if REPLAYED:
            ids, chosen, taken = _look_up(
                given_ptr, tokens, mask, scores, experts, real, TOPK, TOKENS, CHOICES, GROUPS * SIZE, WIDE
            )
        else:
            merits = scores
            if BIASED:
                merits += tl.load(bias_ptr + experts, mask=real, other=0.0).to(WIDE)[None, :]
            ids, chosen, taken = _choose(
                merits, scores, mask, columns, real, group_size, plain, TOPK, CHOICES, NUM_GROUPS, GROUP_TOPK,
                TOKENS, GROUPS, SIZE, WIDE, INT, HIGHEST,
            )  # fmt: skip
        counts += tl.sum(taken, axis=0)
        weights = _topk_probs(chosen, ids < 0, ON_LOGITS, NORMALISED, EPSILON) * SCALING
        slots = tokens[:, None].to(tl.int64) * TOPK + choices[None, :]
        stored = inside[:, None] & (choices < TOPK)[None, :]
        tl.store(ids_ptr + slots, ids.to(tl.int64), mask=stored)
        tl.store(probs_ptr + slots, weights.to(probs_ptr.dtype.element_ty), mask=stored)

    _add_counts(counts_ptr, counts, experts, real)
    if BALANCE:
        _add_counts(counts_ptr + (1 + own_set) * num_experts, counts if plain else plain_counts, experts, real)
        tl.store(shares_ptr + program * num_experts + experts, sums, mask=real)
    if Z:
        tl.store(shares_ptr + programs * num_experts + program, tl.sum(squares, axis=0))
    if BALANCE or Z:
        tl.debug_barrier()  # One thread increments the ticket after the stores of all threads.
        behind = num_experts * (1 + sets) if BALANCE else num_experts
        handle = tl.atomic_add(counts_ptr + behind, 1, sem="acq_rel")
        if handle == programs - 1:
            if BALANCE:  # four tiles at a time, to have more loads in flight
                _add_scores(
                    shares_ptr, scores_ptr, programs, num_experts, sets, experts, real, 4 * TOKENS, GROUPS * SIZE, WIDE
                )
            if Z:
                _add_squares(shares_ptr + programs * num_experts, z_ptr, programs, WIDE)


@triton.jit
def _scores(logits, SCORE: tl.constexpr, ON_LOGITS: tl.constexpr, EPSILON: tl.constexpr):
    """Returns two tensors: scores for selection and probabilities; scores normalised to a sum of 1 per token."""
    if SCORE == "softmax":
        shares, _ = softmax(logits)
        scores = logits if ON_LOGITS else shares
    else:
        scores = score(logits, SCORE)
        shares = scores / (tl.sum(scores, axis=1) + EPSILON)[:, None]
    return scores, shares


@triton.jit
def _take_best(keys, columns, COLUMNS: tl.constexpr, HIGHEST: tl.constexpr):
    """Removes the largest key of every row, at the lowest column among ties. Returns (remaining keys, key, column)."""
    peak = tl.max(keys, axis=1)
    column = tl.min(tl.where(keys == peak[:, None], columns[None, :], COLUMNS), axis=1)
    return tl.where(columns[None, :] == column[:, None], -HIGHEST - 1, keys), peak, column


@triton.jit
def _limit_to_groups(
    keys, TOPK: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, TOKENS: tl.constexpr,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    """Lowers the keys of experts outside the best GROUP_TOPK groups below all other keys. Returns all keys. The score
    of a group is the sum of its TOPK // GROUP_TOPK highest scores."""
    members = tl.reshape(keys, (TOKENS * GROUPS, SIZE))
    positions = tl.arange(0, SIZE)
    worth = tl.zeros((TOKENS * GROUPS,), dtype=WIDE)
    for _ in tl.static_range(TOPK // GROUP_TOPK):
        members, peak, _ = _take_best(members, positions, SIZE, HIGHEST)
        worth += floats_of_sortable_ints(peak, WIDE, HIGHEST)
    groups = tl.arange(0, GROUPS)
    group_keys = tl.reshape(sortable_ints(worth, INT, HIGHEST), (TOKENS, GROUPS))
    group_keys = tl.where((groups < NUM_GROUPS)[None, :], group_keys, -HIGHEST - 1)
    for _ in tl.static_range(GROUP_TOPK):
        group_keys, _, _ = _take_best(group_keys, groups, GROUPS, HIGHEST)
    chosen = tl.expand_dims((group_keys == -HIGHEST - 1).to(tl.int32), 2)
    allowed = tl.reshape(tl.broadcast_to(chosen, (TOKENS, GROUPS, SIZE)), (TOKENS, GROUPS * SIZE))
    return tl.where(allowed != 0, keys, tl.minimum(keys, -HIGHEST))


@triton.jit
def _choose(
    merits, scores, mask, columns, real, group_size, PLAIN: tl.constexpr, TOPK: tl.constexpr, CHOICES: tl.constexpr,
    NUM_GROUPS: tl.constexpr, GROUP_TOPK: tl.constexpr, TOKENS: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, WIDE: tl.constexpr, INT: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    """Selects the top-k by `merits`. Returns (chosen ids, best first; their `scores`; mask of their columns)."""
    keys = tl.where(real[None, :], sortable_ints(merits, INT, HIGHEST), -HIGHEST - 1)
    if GROUP_TOPK > 0:
        keys = _limit_to_groups(keys, TOPK, NUM_GROUPS, GROUP_TOPK, TOKENS, GROUPS, SIZE, WIDE, INT, HIGHEST)
    choices = tl.arange(0, CHOICES)
    ids = tl.full((TOKENS, CHOICES), -1, dtype=tl.int32)
    chosen = tl.zeros((TOKENS, CHOICES), dtype=WIDE)
    for k in range(TOPK):
        keys, peak, column = _take_best(keys, columns, GROUPS * SIZE, HIGHEST)
        if PLAIN:  # keys encode the scores themselves, so the scores need not be gathered
            own = floats_of_sortable_ints(peak, WIDE, HIGHEST)
        else:
            own = tl.sum(tl.where(columns[None, :] == column[:, None], scores, 0.0), axis=1)
        expert = column // SIZE * group_size + column % SIZE
        ids = tl.where((choices == k)[None, :], expert[:, None], ids)
        chosen = tl.where((choices == k)[None, :], own[:, None], chosen)
    taken = (keys == -HIGHEST - 1) & real[None, :] & mask[:, None]
    return tl.where(mask[:, None], ids, -1), chosen, taken.to(tl.int32)


@triton.jit
def _look_up(
    given_ptr, tokens, mask, scores, experts, real, TOPK: tl.constexpr, TOKENS: tl.constexpr, CHOICES: tl.constexpr,
    COLUMNS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Loads given choices, which replace the top-k. Returns (expert ids, their scores, mask of their columns)."""
    choices = tl.arange(0, CHOICES)
    ids = tl.full((TOKENS, CHOICES), -1, dtype=tl.int32)
    chosen = tl.zeros((TOKENS, CHOICES), dtype=WIDE)
    taken = tl.zeros((TOKENS, COLUMNS), dtype=tl.int32)
    for k in range(TOPK):
        expert = tl.load(given_ptr + tokens.to(tl.int64) * TOPK + k, mask=mask, other=-1).to(tl.int32)
        hit = (experts[None, :] == expert[:, None]) & real[None, :]
        own = tl.sum(tl.where(hit, scores, 0.0), axis=1)
        ids = tl.where((choices == k)[None, :], expert[:, None], ids)
        chosen = tl.where((choices == k)[None, :], own[:, None], chosen)
        taken += hit.to(tl.int32)
    return ids, chosen, taken


@triton.jit
def _topk_probs(chosen, none, ON_LOGITS: tl.constexpr, NORMALISED: tl.constexpr, EPSILON: tl.constexpr):
    """Probabilities of the choices before scaling; 0 where `none` is True (the token has fewer choices)."""
    if ON_LOGITS:
        weights, _ = softmax(tl.where(none, float("-inf"), chosen))
    else:
        weights = tl.where(none, 0.0, chosen)
        if NORMALISED:
            weights = weights / (tl.sum(weights, axis=1) + EPSILON)[:, None]
    return weights


@triton.jit
def _count_plain(
    scores, mask, columns, real, TOPK: tl.constexpr, COLUMNS: tl.constexpr, INT: tl.constexpr, HIGHEST: tl.constexpr
):
    """Number of tokens per expert whose top-k contains this expert, if the top-k ignores the bias and the groups."""
    keys = tl.where(real[None, :], sortable_ints(scores, INT, HIGHEST), -HIGHEST - 1)
    for _ in range(TOPK):
        keys, _, _ = _take_best(keys, columns, COLUMNS, HIGHEST)
    best = (keys == -HIGHEST - 1) & real[None, :] & mask[:, None]
    return tl.sum(best.to(tl.int32), axis=0)


@triton.jit
def _add_counts(counts_ptr, counts, experts, real):
    tl.atomic_add(counts_ptr + experts, counts.to(tl.int64), mask=real & (counts > 0), sem="relaxed")


@triton.jit
def _add_scores(
    shares_ptr, scores_ptr, programs, num_experts, sets, experts, real, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Adds the partial score sums and stores the total of each set. Program p computed a sum for set p % sets."""
    for each in range(sets):
        total = tl.zeros((ROWS, COLUMNS), dtype=WIDE)
        for first in range(each, programs, ROWS * sets):
            rows = first + tl.arange(0, ROWS) * sets
            mask = (rows < programs)[:, None] & real[None, :]
            share = shares_ptr + rows[:, None] * num_experts + experts[None, :]
            total += tl.load(share, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(scores_ptr + each * num_experts + experts, tl.sum(total, axis=0), mask=real)


@triton.jit
def _add_squares(shares_ptr, z_ptr, programs, WIDE: tl.constexpr):
    total = tl.zeros((256,), dtype=WIDE)
    for first in range(0, programs, 256):
        rows = first + tl.arange(0, 256)
        total += tl.load(shares_ptr + rows, mask=rows < programs, other=0.0, cache_modifier=".cg")
    tl.store(z_ptr, tl.sum(total, axis=0))
