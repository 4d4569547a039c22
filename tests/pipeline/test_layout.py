"""Pipeline layouts: the layout language and its rules, layouts from numbers of layers, and balanced layouts."""

import pytest

from megatron_moe.config.pipeline_layout import (
    LayoutError,
    StageLayout,
    StageMap,
    even_layout,
    parse_layout,
    virtual_stages,
)
from megatron_moe.cost_model.flops import flops_per_step
from megatron_moe.cost_model.stage_costs import StageCosts, cost_table, flop_costs
from megatron_moe.planner.auto_layout import auto_layout
from tests.helpers import tiny
from tests.helpers.zoo import model_config, zoo_rows


def layers_per_stage(layout) -> list[int]:
    return [len(stage.layers) for stage in layout.stages]


# ---- layout language


@pytest.mark.parametrize(
    ("text", "pp", "num_layers", "num_mtp", "layers"),
    [
        ("EtL", 1, 1, 0, [1]),
        ("Et*4|(tttt|)*14tmL", 16, 61, 1, [4] + [4] * 14 + [1]),
        ("Et*2|(tt|)*22t|(tt|)*7mL", 16, 61, 1, [2] + [2] * 22 + [1] + [2] * 7 + [0]),
        ("Et|(tt|)*30mL", 16, 61, 1, [1] + [2] * 30 + [0]),
        ("Et*2|(tt|)*5t|tmL", 8, 14, 1, [2] + [2] * 5 + [1, 1]),
        ("Et*7|t*7mL", 2, 14, 1, [7, 7]),
        ("Et|t|(tt|)*29tL", 16, 61, 0, [1, 1] + [2] * 29 + [1]),
        ("Et*3|(tt|)*29m|L", 16, 61, 1, [3] + [2] * 29 + [0, 0]),
        ("E,t,t,|,t||tL", 2, 4, 0, [2, 1, 0, 1]),
        ("E|*3tL", 4, 1, 0, [0, 0, 0, 1]),
    ],
)
def test_layouts_of_recipes_are_parsed(text, pp, num_layers, num_mtp, layers):
    layout = parse_layout(text, pp=pp, num_layers=num_layers, num_mtp=num_mtp)
    assert layers_per_stage(layout) == layers
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(num_layers))
    assert layout.vpp == len(layers) // pp
    assert [stage.embedding for stage in layout.stages] == [True] + [False] * (len(layers) - 1)
    assert [stage.loss for stage in layout.stages] == [False] * (len(layers) - 1) + [True]
    assert sum(stage.num_mtp for stage in layout.stages) == num_mtp


def test_a_layout_written_out_reads_back():
    for text, pp, num_layers, num_mtp in (("Et*3|(tt|)*29m|L", 16, 61, 1), ("E||t*3|||tL", 2, 4, 0), ("EtL", 1, 1, 0)):
        layout = parse_layout(text, pp=pp, num_layers=num_layers, num_mtp=num_mtp)
        assert parse_layout(str(layout), pp=pp, num_layers=num_layers, num_mtp=num_mtp) == layout
    assert str(parse_layout("Ettt|tt|tt|m|L", pp=5, num_layers=7, num_mtp=1)) == "Et*3|(tt|)*2m|L"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ettx|tL", r"has 'x'"),
        ("E(t(t|))*2tL", r"has '\(';.*do not nest"),
        ("E(tt)tL", r"has '\('"),
        ("Ett|tttL", r"has 5 decoder layers \(t\); the model has 4"),
        ("EEtt|ttL", r"has 2 embeddings \(E\); the model has 1"),
        ("Ett|tt", r"has 0 losses \(L\); the model has 1"),
        ("Etm|tttL", r"has 1 layers of multi-token prediction \(m\); the model has 0"),
        ("tEt|ttL", "must begin with E"),
        ("|Ett|t|tL", "must begin with E"),
        ("Ett|tLt", "must end with L"),
        ("Ett|ttL|", "must end with L"),
        ("Ett|t|tL", "has 3 stages, which cannot be divided among 2 pipeline ranks; use 2 or 4"),
    ],
)
def test_invalid_layouts_are_rejected(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_layout(text, pp=2, num_layers=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|tmm|t|tL", "t after an m"),
        ("Ett|tt|m|mL", r"has m in stages \[2, 3\]"),
        ("Ett|ttmm||L", "has m in stage 1, chunk 0 of rank 1.*stages 3 to 3"),
        ("Ett|tt|mm|L", "has m in stage 2, chunk 1 of rank 0.*a rank other than 0"),
    ],
)
def test_mtp_stage_follows_megatrons_rules(text, message):
    with pytest.raises(LayoutError, match=message):
        parse_layout(text, pp=2, num_layers=4, num_mtp=2)
    assert parse_layout("Ett|tt||mmL", pp=2, num_layers=4, num_mtp=2).stages[-1].num_mtp == 2
    assert parse_layout("Et*4mmL", pp=1, num_layers=4, num_mtp=2).stages[0].num_mtp == 2


def test_standalone_stages_leave_the_final_norm_with_the_last_layer():
    layout = parse_layout("Ett|tt|m|L", pp=4, num_layers=4, num_mtp=1)
    assert layout.stages == (
        StageLayout(layers=(0, 1), embedding=True),
        StageLayout(layers=(2, 3), final_norm=True),
        StageLayout(num_mtp=1),
        StageLayout(loss=True),
    )
    assert layout.embedding_ranks(tied=False) == (0, 2)
    assert layout.embedding_ranks(tied=True) == (0, 2, 3)
    assert even_layout(4, pp=2, num_mtp=1).embedding_ranks(tied=False) == (0, 1)
    assert even_layout(4, pp=1, num_mtp=1).embedding_ranks(tied=True) == (0,)


# ---- stages on ranks


def test_stages_are_assigned_to_ranks_round_robin():
    layout = even_layout(12, pp=3, vpp=2)
    assert [stage.layers for stage in layout.chunks(0)] == [(0, 1), (6, 7)]
    assert [stage.layers for stage in layout.chunks(2)] == [(4, 5), (10, 11)]
    stages = StageMap(3, 2)
    assert [stages.rank_and_chunk(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1)]
    assert all(stages.stage(*stages.rank_and_chunk(stage)) == stage for stage in range(6))


# ---- layouts from numbers of layers


@pytest.mark.parametrize(
    ("sizes", "layers"),
    [
        ({"num_layers": 8}, [8]),
        ({"num_layers": 8, "pp": 4}, [2] * 4),
        ({"num_layers": 8, "pp": 2, "vpp": 2}, [2] * 4),
        ({"num_layers": 61, "pp": 8, "first": 7, "last": 6}, [7] + [8] * 6 + [6]),
        ({"num_layers": 7, "pp": 4, "first": 1}, [1, 2, 2, 2]),
        ({"num_layers": 7, "pp": 4, "last": 1}, [2, 2, 2, 1]),
        ({"num_layers": 7, "pp": 2, "first": 3, "last": 4}, [3, 4]),
        ({"num_layers": 16, "pp": 3, "vpp": 2, "first": 4, "last": 4}, [2, 4, 2, 2, 4, 2]),
        (
            {"num_layers": 14, "pp": 4, "vpp": 2, "account_for_embedding": True, "account_for_loss": True},
            [1, *[2] * 6, 1],
        ),
        ({"num_layers": 7, "pp": 4, "account_for_loss": True}, [2, 2, 2, 1]),
        ({"num_layers": 2, "pp": 4, "account_for_embedding": True, "account_for_loss": True}, [0, 1, 1, 0]),
    ],
)
def test_layers_are_placed_by_megatrons_arithmetic(sizes, layers):
    layout = even_layout(**sizes)
    assert layers_per_stage(layout) == layers
    assert [layer for stage in layout.stages for layer in stage.layers] == list(range(sizes["num_layers"]))
    assert sum(stage.final_norm for stage in layout.stages) == 1


def test_chunks_of_an_even_layout_start_at_megatrons_offsets():
    """Chunk v of rank p starts at v (L / vpp) + p (L / pp / vpp)."""
    for num_layers, pp, vpp in ((24, 4, 3), (32, 8, 2), (12, 2, 3)):
        layout = even_layout(num_layers, pp=pp, vpp=vpp)
        for rank in range(pp):
            for chunk, stage in enumerate(layout.chunks(rank)):
                assert stage.layers[0] == chunk * num_layers // vpp + rank * num_layers // pp // vpp


def test_mtp_is_on_the_last_stage_by_default():
    assert [stage.num_mtp for stage in even_layout(8, pp=2, vpp=2, num_mtp=2).stages] == [0, 0, 0, 2]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_layers": 61, "pp": 8}, "61 layers cannot be divided among 8 pipeline ranks"),
        ({"num_layers": 61, "pp": 8, "account_for_loss": True}, "61 layers and 1 for embedding and loss cannot be"),
        ({"num_layers": 61, "pp": 8, "first": 4, "last": 4}, "61 layers less 4 and 4 leave 53.*the other 6"),
        ({"num_layers": 4, "pp": 2, "first": 3, "last": 2}, "leave -1"),
        ({"num_layers": 4, "pp": 1, "first": 2, "last": 2}, "first and the last rank are the same"),
        (
            {"num_layers": 7, "pp": 3, "vpp": 2, "first": 3, "last": 2},
            "3 layers of pipeline rank 0 cannot be divided into 2",
        ),
        ({"num_layers": 7, "pp": 2, "first": 3, "account_for_loss": True}, "cannot be combined"),
    ],
)
def test_numbers_that_do_not_divide_are_rejected(sizes, message):
    with pytest.raises(LayoutError, match=message):
        even_layout(**sizes)


def test_virtual_stages_follow_from_their_number_of_layers():
    assert virtual_stages(24, pp=4, per_virtual_stage=2) == 3
    assert virtual_stages(24, pp=4, per_virtual_stage=6) == 1
    with pytest.raises(LayoutError, match="24 layers over 4 pipeline ranks: 6 per rank.*of 4 layers"):
        virtual_stages(24, pp=4, per_virtual_stage=4)
    with pytest.raises(LayoutError, match=r"61 layers over 4 pipeline ranks: 15.25 per rank"):
        virtual_stages(61, pp=4, per_virtual_stage=1)


# ---- balanced layouts


def test_expensive_loss_takes_layers_from_the_last_stage():
    layout = auto_layout(StageCosts(layers=(1.0,) * 10, loss=2.0), pp=4)
    assert layers_per_stage(layout) == [3, 3, 3, 1], "12 units over 4 stages are 3 each"


def test_layers_of_different_cost_are_balanced_by_cost_and_not_by_number():
    layout = auto_layout(StageCosts(layers=(1.0, 1.0, 1.0, 3.0, 3.0, 3.0)), pp=4)
    assert layers_per_stage(layout) == [3, 1, 1, 1]


def test_maximum_stage_cost_has_priority_over_evenness():
    """Stages of cost 6, 2 and 3 would have a smaller sum of squares, but a higher maximum."""
    assert layers_per_stage(auto_layout(StageCosts(layers=(1.0, 5.0, 2.0, 3.0)), pp=3)) == [1, 1, 2]


def test_maximum_stage_cost_is_optimal():
    """The maximum equals the smallest one over all divisions of 7 layers into 3 stages."""
    for seed in range(20):
        costs = StageCosts(
            layers=tuple(float((seed * 7 + layer * layer * 3) % 5 + 1) for layer in range(7)),
            embedding=float(seed % 2),
            loss=float(seed % 4),
        )
        cuts = [(a, b, 7 - a - b) for a in range(8) for b in range(8 - a)]
        below = [0.0]
        for cost in costs.layers:
            below.append(below[-1] + cost)
        dearest = min(
            max(costs.embedding + below[a], below[a + b] - below[a], costs.loss + below[7] - below[a + b])
            for a, b, _ in cuts
        )
        assert max(costs.of_stage(stage) for stage in auto_layout(costs, pp=3).stages) == dearest


def test_mtp_is_on_the_stage_before_the_loss_if_that_is_more_even():
    costs = StageCosts(layers=(1.0,) * 8, mtp=1.0, loss=3.0)
    layout = auto_layout(costs, pp=4, num_mtp=1)
    assert str(layout) == "Et*3|t*3|ttm|L"
    assert layout.stages[2].final_norm


def test_auto_layouts_of_public_models_read_back_and_are_more_even_than_equal_numbers():
    rows = {str(row): row for row in zoo_rows()}
    for name, pp, vpp in (
        ("DeepSeek-V3", 16, 2),
        ("Qwen3-235B-A22B", 8, 4),
        ("Kimi-K2", 16, 2),
        ("Mixtral-8x7B", 4, 8),
    ):
        model = model_config(rows[name])
        num_mtp, costs = model.mtp.num_layers if model.mtp else 0, flop_costs(model, 4096)
        layout = auto_layout(costs, pp=pp, vpp=vpp, num_mtp=num_mtp)
        assert parse_layout(str(layout), pp=pp, num_layers=len(model.layers), num_mtp=num_mtp) == layout
        dearest = max(costs.of_stage(stage) for stage in layout.stages)
        # The most expensive stage costs at least the mean, the most expensive layer, and the loss.
        least = max(costs.total / (pp * vpp), max(costs.layers), costs.loss)
        assert dearest <= least + max(costs.layers)


def test_auto_layout_rejects_more_stages_than_layers():
    with pytest.raises(LayoutError, match="3 layers cannot fill 4 pipeline ranks x 2 virtual stages"):
        auto_layout(StageCosts(layers=(1.0,) * 3), pp=4, vpp=2)


def test_costs_of_a_model_add_up_to_its_flops():
    from_parts = flop_costs(tiny.model(num_layers=3), 32)
    assert len(from_parts.layers) == 3
    assert (
        from_parts.of_stage(even_layout(3).stages[0])
        == from_parts.total
        == flops_per_step(tiny.model(num_layers=3), 1, 32)
    )


def test_tables_list_every_stage_and_the_most_expensive_rank():
    costs = StageCosts(layers=(1.0,) * 4, loss=1.0)
    layout = even_layout(4, pp=2)
    assert layout.table().splitlines() == [
        "stage rank chunk  holds",
        "    0    0     0  embedding, layers 0-1 (2)",
        "    1    1     0  layers 2-3 (2), final norm, loss",
    ]
    lines = cost_table(layout, costs).splitlines()
    assert lines[1].endswith(" 40.0%") and lines[2].endswith(" 60.0%")
    assert lines[-1] == "rank 1 has the highest cost: 1.200 times the mean over 2 ranks"
