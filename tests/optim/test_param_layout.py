"""Placement of parameters in flat buffers: alignment, order, buckets, and what shares a buffer."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_moe.config.optimizer import OptimizerConfig
from megatron_moe.config.parallel import DataParallelConfig
from megatron_moe.optim.param_layout import (
    BUCKET_ALIGN,
    ELEMENT_ALIGN,
    ParamLayout,
    ParamShape,
    decays,
    default_bucket_size,
    place_parameters,
    reduction_order,
)
from megatron_moe.parallel.param_meta import ParamMeta


def parameter(name: str, *shape: int, **meta: object) -> ParamShape:
    return ParamShape(name=name, shape=shape, storage="fp32", meta=ParamMeta(**{"role": "matrix", **meta}))


def place(parameters: list[ParamShape], num_ranks: int = 1, bucket_size: int | None = None, **changes) -> ParamLayout:
    config = DataParallelConfig(bucket_size=bucket_size)
    shards = {"attention": num_ranks, "expert": num_ranks}
    return place_parameters(parameters, OptimizerConfig(**changes), num_shards=shards, config=config)


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=20),
    num_ranks=st.integers(1, 12),
    bucket_size=st.integers(1, 1000),
)
def test_places_are_aligned_and_apart_and_buckets_divide_among_the_ranks(
    sizes: list[int], num_ranks: int, bucket_size: int
) -> None:
    parameters = [parameter(f"p{i}", 1, size) for i, size in enumerate(sizes)]
    (buffer,) = place(parameters, num_ranks, bucket_size).buffers
    assert [place.name for place in buffer.places] == [p.name for p in reversed(parameters)]
    free = 0
    for spot in buffer.places:
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
    assert [spot.bucket for spot in buffer.places] == [0, 0, 1, 1, 2]
    assert buffer.buckets == ((0, 256), (256, 512), (512, 640))


def test_the_default_bucket_grows_with_the_ranks() -> None:
    assert (default_bucket_size(1), default_bucket_size(40), default_bucket_size(100)) == (40_000_000,) * 2 + (10**8,)


def test_what_is_reduced_or_stepped_differently_has_a_buffer_of_its_own() -> None:
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
    together = [{spot.name for spot in buffer.places} for buffer in place(parameters).buffers]
    assert {"output_layer.weight", "b.linear.weight", "a.linear.weight", "embedding.word_embeddings.weight"} in together
    assert sorted(map(len, together)) == [1, 1, 1, 1, 4]
    apart = [{spot.name for spot in buffer.places} for buffer in place(parameters, decoupled_lr=1e-3).buffers]
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
    assert {p.name: decays(p, decay_qk_norm=False) for p in cases} == {p.name: yes for p, yes in cases.items()}


def test_norms_of_q_and_k_decay_on_request_and_others_never() -> None:
    names = ("a.q_layernorm.weight", "a.k_layernorm.weight", "a.kv_layernorm.weight", "a.input_layernorm.weight")
    norms = [parameter(name, 4, role="norm", decay=False) for name in names]
    assert [decays(norm, decay_qk_norm=True) for norm in norms] == [True, True, False, False]
    assert not any(decays(norm, decay_qk_norm=False) for norm in norms)


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
        names = [spot.name for spot in layout.buffers[number].places if spot.bucket == bucket]
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
        (DataParallelConfig(num_buckets=4), 4, 3 * BUCKET_ALIGN),
        (DataParallelConfig(num_buckets=2, pad_buckets=True), 2, 1 << 16),
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
    found = {tuple(spot.name for spot in buffer.places): buffer.key for buffer in place(list(kinds)).buffers}
    assert set(found) == {("a",), ("b",), ("c",), ("e", "d")}, "alone on its axis a part of a gradient is all of it"
    assert found["a",].partial and not found["b",].partial
