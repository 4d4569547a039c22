"""Placement of parameters in flat buffers: alignment, order, buckets, and assignment to buffers."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.component import ParamSpec
from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig, ParallelConfig
from megatron_moe.config.param_meta import ParamMeta, local_boxes, local_shape
from megatron_moe.config.registry import UPDATE_RULES
from megatron_moe.config.update_rules import OwnerAlignment
from megatron_moe.cost_model.shards import parameters_of_rank
from megatron_moe.optim.param_layout import (
    BUCKET_ALIGN,
    ELEMENT_ALIGN,
    ParamLayout,
    ParamShape,
    default_bucket_size,
    forward_order,
    has_weight_decay,
    place_parameters,
    reduction_order,
)
from tests.memory_emulation.test_agreement import plan_of


def parameter(name: str, *shape: int, **meta: object) -> ParamShape:
    return ParamShape(name=name, shape=shape, storage="fp32", meta=ParamMeta(**{"role": "matrix", **meta}))


def place(parameters: list[ParamShape], num_ranks: int = 1, bucket_size: int | None = None, **changes) -> ParamLayout:
    config = DataParallelConfig(ddp_bucket_size=bucket_size)
    shards = {"attention": num_ranks, "expert": num_ranks}
    return place_parameters(parameters, OptimizerConfig(**changes), num_shards=shards, config=config)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    num_ranks=st.integers(1, 12),
    bucket_size=st.integers(1, 1000),
)
def test_slots_are_aligned_and_disjoint_and_buckets_divide_among_the_ranks(
    sizes: list[int], num_ranks: int, bucket_size: int
) -> None:
    parameters = [parameter(f"p{i}", 1, size) for i, size in enumerate(sizes)]
    (buffer,) = place(parameters, num_ranks, bucket_size).buffers
    assert [place.name for place in buffer.params] == [p.name for p in reversed(parameters)]
    free = 0
    for spot in buffer.params:
        assert spot.start % ELEMENT_ALIGN == 0 and spot.start >= free
        free = spot.end
        start, end = buffer.buckets[spot.bucket]
        assert start <= spot.start and spot.end <= end, f"{spot} leaves its bucket {start}..{end}"
    assert buffer.padding == buffer.size - sum(sizes) >= 0
    edges = [edge for bucket in buffer.buckets for edge in bucket]
    assert (edges[0], edges[-1]) == (0, buffer.size)
    assert edges[1:-1:2] == edges[2::2], "buckets leave a gap"
    assert all((end - start) % num_ranks == 0 and end % BUCKET_ALIGN == 0 for start, end in buffer.buckets)


def test_a_bucket_closes_with_the_parameter_that_fills_it() -> None:
    parameters = [parameter(f"p{i}", 64, 2) for i in range(5)]
    (buffer,) = place(parameters, bucket_size=200).buffers
    assert [spot.bucket for spot in buffer.params] == [0, 0, 1, 1, 2]
    assert buffer.buckets == ((0, 256), (256, 512), (512, 640))


def test_the_default_bucket_grows_with_the_ranks() -> None:
    assert (default_bucket_size(1), default_bucket_size(40), default_bucket_size(100)) == (40_000_000,) * 2 + (10**8,)


def test_parameters_that_are_reduced_or_stepped_differently_have_separate_buffers() -> None:
    parameters = [
        parameter("embedding.word_embeddings.weight", 8, 4, role="embedding"),
        parameter("a.linear.weight", 4, 4),
        parameter("a.norm.weight", 4, role="norm"),
        parameter("a.mlp.router.weight", 4, 4, role="router"),
        parameter("a.mlp.experts.linear_fc1.weight", 4, 4, 4, grid="expert"),
        parameter("a.mlp.experts.linear_fc1.bias", 4, 4, role="bias", grid="expert"),
        parameter("b.linear.weight", 4, 4),
        parameter("output_layer.weight", 8, 4, role="head"),
    ]
    together = [{spot.name for spot in buffer.params} for buffer in place(parameters).buffers]
    assert {"output_layer.weight", "b.linear.weight", "a.linear.weight", "embedding.word_embeddings.weight"} in together
    assert sorted(map(len, together)) == [1, 1, 1, 1, 4]
    apart = [{spot.name for spot in buffer.params} for buffer in place(parameters, decoupled_lr=1e-3).buffers]
    assert {"output_layer.weight", "embedding.word_embeddings.weight"} in apart
    assert {"b.linear.weight", "a.linear.weight"} in apart


def test_matrices_decay_and_vectors_and_biases_do_not() -> None:
    cases = {
        parameter("a.linear.weight", 4, 4): True,
        parameter("a.linear.bias", 4, role="bias"): False,
        parameter("a.mlp.experts.linear_fc1.bias", 2, 4, role="bias", grid="expert"): False,
        parameter("a.norm.weight", 4, role="norm"): False,
        parameter("a.self_attention.sinks", 4, role="sink"): False,
        parameter("a.shared_experts.gate_weight", 1, 4, role="gate"): True,
        parameter("embedding.word_embeddings.weight", 8, 4, role="embedding", decay=False): False,
    }
    assert {p.name: has_weight_decay(p, decay_qk_norm=False) for p in cases} == {
        p.name: yes for p, yes in cases.items()
    }


def test_norms_of_q_and_k_decay_on_request_and_others_never() -> None:
    names = ("a.q_layernorm.weight", "a.k_layernorm.weight", "a.kv_layernorm.weight", "a.input_layernorm.weight")
    norms = [parameter(name, 4, role="norm", decay=False) for name in names]
    assert [has_weight_decay(norm, decay_qk_norm=True) for norm in norms] == [True, True, False, False]
    assert not any(has_weight_decay(norm, decay_qk_norm=False) for norm in norms)


def test_buckets_of_all_buffers_come_in_the_order_of_a_backward_pass() -> None:
    parameters = [
        parameter("embedding.word_embeddings.weight", 8, 4, role="embedding"),
        *(
            parameter(f"decoder.layers.{i}.{name}", *shape, role=role)
            for i in range(3)
            for name, shape, role in (("norm.weight", (4,), "norm"), ("linear.weight", (16, 16), "matrix"))
        ),
        parameter("output_layer.weight", 8, 4, role="head"),
    ]
    layout = place(parameters, bucket_size=200)
    order = reduction_order(layout)
    assert len(order) == sum(len(buffer.buckets) for buffer in layout.buffers)
    firsts = []
    for number, bucket in order:
        names = [spot.name for spot in layout.buffers[number].params if spot.bucket == bucket]
        firsts.append(min(next(i for i, p in enumerate(parameters) if p.name == name) for name in names))
    assert firsts == sorted(firsts, reverse=True) and len(set(firsts)) == len(firsts)
    norms = next(i for i, buffer in enumerate(layout.buffers) if not buffer.key.decay)
    assert order.index((norms, 0)) == len(order) - 2, (
        "norms of all layers are one bucket, complete with the first layer"
    )


def test_a_number_of_buckets_gives_their_size_and_padding_is_on_request() -> None:
    parameters = [parameter(f"p{i}", 64, 2) for i in range(8)]
    shards = {"attention": 3, "expert": 3}
    for config, num_buckets, align in (
        (DataParallelConfig(ddp_num_buckets=4), 4, 3 * BUCKET_ALIGN),
        (DataParallelConfig(ddp_num_buckets=2, ddp_pad_buckets_for_high_nccl_busbw=True), 2, 1 << 16),
        (DataParallelConfig(), 1, 3 * BUCKET_ALIGN),
    ):
        (buffer,) = place_parameters(parameters, OptimizerConfig(), num_shards=shards, config=config).buffers
        assert len(buffer.buckets) == num_buckets
        assert all(end % align == 0 and (end - start) % (3 * BUCKET_ALIGN) == 0 for start, end in buffer.buckets)


def test_copies_over_ranks_stages_and_parts_of_gradients_are_kept_apart() -> None:
    meta = {"role": "norm", "partial_over_tp": True}
    kinds = (
        ParamShape(name="a", shape=(4,), storage="fp32", meta=ParamMeta(**meta), replicated=True),
        ParamShape(name="b", shape=(4,), storage="fp32", meta=ParamMeta(role="norm"), replicated=True),
        ParamShape(name="c", shape=(4,), storage="fp32", meta=ParamMeta(role="norm"), shared_stages=True),
        ParamShape(name="d", shape=(4,), storage="fp32", meta=ParamMeta(**meta)),
        ParamShape(name="e", shape=(4,), storage="fp32", meta=ParamMeta(role="norm")),
    )
    found = {tuple(spot.name for spot in buffer.params): buffer.key for buffer in place(list(kinds)).buffers}
    assert set(found) == {("a",), ("b",), ("c",), ("e", "d")}, "alone on its axis a part of a gradient is all of it"
    assert found["a",].partial and not found["b",].partial


STACKS = st.tuples(st.integers(1, 4), st.integers(1, 30), st.integers(1, 80))
SHAPES = st.one_of(
    st.integers(1, 400).map(lambda size: (size, {"role": "bias"})),
    st.tuples(st.integers(1, 300), st.integers(1, 80)).map(lambda shape: (*shape, {})),
    STACKS.map(lambda shape: (*shape, {"grid": "expert", "num_experts": shape[0]})),
    STACKS.map(lambda shape: (shape[0], 5 * shape[2], {"grid": "expert", "num_experts": shape[0], "role": "bias"})),
    st.integers(1, 3).map(lambda groups: (groups * 8, 50, {"tp_dim": 0, "splits": (4, 2, 2)})),
    st.just((6, 90, {"tp_dim": 0, "splits": (6, 6)})),
)


def indivisible(shape: ParamShape, alignment: OwnerAlignment) -> list[tuple[int, int]]:
    """Returns (start, end), in elements, of every block or matrix of a parameter that one rank has to own."""
    stack, (rows, columns) = shape.numel, (1, *shape.shape[1 if shape.meta.num_experts else 0 :])[-2:]
    stack //= rows * columns
    if alignment == "element":
        heights, width = [1] * rows, 1
    elif alignment == "block_1x32":
        heights, width = [1] * rows, 32 if columns % 32 == 0 else columns
    elif alignment == "block_128x128":
        heights, width = [min(128, rows - row) for row in range(0, rows, 128)], columns
    else:
        heights, width = [rows], columns
    ranges, start = [], 0
    for height in heights * stack:
        for _ in range(columns // width):
            ranges.append((start, start + height * width))
            start += height * width
    return ranges


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=6),
    num_owners=st.integers(1, 5),
    bucket_size=st.integers(1, 30_000),
    alignment=st.sampled_from(["element", "block_1x32", "block_128x128", "matrix"]),
)
def test_every_element_has_one_owner_and_no_block_or_matrix_has_two(
    shapes: list[tuple], num_owners: int, bucket_size: int, alignment: OwnerAlignment
) -> None:
    parameters = [parameter(f"p{i}", *shape, **meta) for i, (*shape, meta) in enumerate(shapes)]
    with UPDATE_RULES.restored():
        UPDATE_RULES.register("aligned", replace(UPDATE_RULES.get("adam"), alignment=alignment))
        buffers = place(parameters, num_owners, bucket_size, optimizer="aligned").buffers
        owners = [buffer.owner_ranges(num_owners) for buffer in buffers]
    for buffer, owned in zip(buffers, owners, strict=True):
        owner = [-1] * buffer.size
        starts = {
            spot.start + start: spot.start + end
            for spot in buffer.params
            for start, end in indivisible(spot.parameter, alignment)
        }
        for number, ranges in enumerate(owned):
            assert len(ranges) == len(buffer.buckets)
            for (start, end), (first, last) in zip(ranges, buffer.buckets, strict=True):
                assert first <= start <= end <= last and owner[start:end] == [-1] * (end - start)
                owner[start:end] = [number] * (end - start)
                equal = first + number * (last - first) // num_owners
                if alignment != "matrix":
                    assert start == equal or start < equal < starts[start], "an edge moved further than needed"
        assert -1 not in owner
        for start, end in starts.items():
            assert len(set(owner[start:end])) == 1, f"{start}..{end} has several owners"
        assert sum(end - start for start, end in starts.items()) == buffer.size - buffer.padding
        if alignment == "matrix":
            costs = [cost for spot in buffer.params for cost in spot.parameter.matrix_costs]
            loads = [0] * num_owners
            for start, cost in zip(starts, costs, strict=True):
                loads[owner[start]] += cost
            assert max(loads) <= sum(loads) / num_owners + max(costs), "the updates of one owner take longer"


def test_owners_without_a_matrix_in_one_bucket_get_those_of_the_next() -> None:
    parameters = [parameter(f"p{i}", 64, 64) for i in range(12)]
    layout = place(parameters, 4, 3 * 64 * 64, optimizer="muon").buffers[0]
    assert len(layout.buckets) == 4
    sizes = [sum(layout.num_elements(*part) for part in owned) for owned in layout.owner_ranges(4)]
    assert sizes == [3 * 64 * 64] * 4


@pytest.mark.parametrize(
    ("recipe", "owners", "dense", "experts"),
    [("m27", (8, 2), 1.31, 1.01), ("m27", (32, 8), 2.54, 1.01), ("kimi-k2-h100-1024", (8, 2), 1.38, 1.02)],
)
def test_the_updates_of_whole_matrices_of_all_units_are_divided_evenly(
    recipe: str, owners: tuple[int, int], dense: float, experts: float
) -> None:
    """With Muon and sharded weights, no owner's cost exceeds the mean by more than the cost of the largest matrix.

    `dense` and `experts` are the maximum cost of an owner divided by the mean. Dense matrices are divided less evenly,
    because a stage of Kimi-K2 has few of them, and few of Moonlight's are large.
    """
    plan = plan_of(recipe)
    optimizer = replace(plan.optimizer, optimizer="muon")
    parameters = [
        ParamShape(name=name, shape=held_shape(spec, plan.parallel), storage="bf16", meta=spec.meta)
        for name, spec in parameters_of_rank(plan, plan.layout.pp // 2)
    ]
    num_shards = {"attention": owners[0], "expert": owners[1]}
    layout = place_parameters(parameters, optimizer, num_shards=num_shards, by_unit=True)
    loads = {buffer.key.without_unit: [0.0] * num_shards[buffer.key.grid] for buffer in layout.buffers}
    largest = dict.fromkeys(loads, 0)
    for buffer in layout.buffers:
        if buffer.key.rule == "muon":
            key = buffer.key.without_unit
            buffer.owner_ranges(len(loads[key]), loads[key])
            largest[key] = max(largest[key], *(c for param in buffer.params for c in param.parameter.matrix_costs))
    for key, costs in loads.items():
        if key.rule == "muon" and not key.router:
            mean = sum(costs) / len(costs)
            assert 0 < max(costs) <= mean + largest[key], key
            if not key.replicated:
                assert max(costs) <= mean * (experts if key.grid == "expert" else dense), (key, max(costs) / mean)


def held_shape(spec: ParamSpec, parallel: ParallelConfig) -> tuple[int, ...]:
    tp = 0, parallel.etp if spec.meta.grid == "expert" else parallel.tp
    return local_shape(local_boxes(spec.shape, spec.meta, tp=tp, ep=(0, parallel.ep)), spec.meta)


def test_units_are_the_dense_part_and_the_experts_of_each_layer() -> None:
    units = {
        "embedding.word_embeddings.weight": "embedding",
        "decoder.layers.12.self_attention.linear_qkv.weight": "layers.12",
        "decoder.layers.12.mlp.router.weight": "layers.12",
        "decoder.layers.12.mlp.experts.linear_fc1.weight": "layers.12.experts",
        "decoder.final_layernorm.weight": "head",
        "output_layer.weight": "head",
        "mtp.layers.0.eh_proj.weight": "mtp.0",
        "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight": "mtp.0.experts",
    }
    shapes = [parameter(name, 4, 4, grid="expert" if ".experts." in name else "attention") for name in units]
    assert [shape.unit for shape in shapes] == list(units.values())
    layout = place(shapes, bucket_size=1)
    order = forward_order(layout)
    for unit, buckets in layout.buckets_of_units().items():
        held = {
            spot.parameter.unit
            for number, index in (order[bucket] for bucket in buckets)
            for spot in layout.buffers[number].params
            if spot.bucket == index
        }
        assert held == {unit} and list(buckets) == sorted(buckets)


def test_every_unit_can_have_its_own_buffers_of_one_bucket() -> None:
    shapes = [parameter(f"decoder.layers.{i}.mlp.{name}.weight", 8, 40) for i in range(3) for name in ("a", "b")]
    shapes += [parameter("output_layer.weight", 8, 40, decay=False), parameter("output_layer.bias", 8)]
    layout = place_parameters(shapes, OptimizerConfig(), num_shards={"attention": 2, "expert": 2}, by_unit=True)
    found = [{spot.parameter.unit for spot in buffer.params} for buffer in layout.buffers]
    assert found == [{"head"}, {"layers.2"}, {"layers.1"}, {"layers.0"}]
    assert all(buffer.buckets == ((0, buffer.size),) for buffer in layout.buffers)
