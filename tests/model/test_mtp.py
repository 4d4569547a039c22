"""Multi-token prediction against a loop over depths, sequences and positions written from the formula."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megatron_moe.config.model import MTPConfig
from megatron_moe.data.batch import MicroBatch
from megatron_moe.layers.node_chain import run_chain
from megatron_moe.logs.metrics import MetricAccumulator
from megatron_moe.model.gpt import GPT, training_objective
from megatron_moe.model.mtp import shift_left
from megatron_moe.parallel.rng import RNGKey
from tests.helpers import naive_layers
from tests.helpers.tiny_models import build, gradients, layer_config, microbatch, mla_config, model_config
from tests.helpers.tolerances import EXACT, FP64_REF

SEGMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0, 1, 1]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 5, 0, 1]])


def ahead(document: list[int], s: int, d: int) -> int | None:
    """Position s + d if it is in the same document, otherwise None."""
    return s + d if s + d < len(document) and document[s] == document[s + d] else None


def loss_by_loop(model: GPT, batch: MicroBatch, mtp: MTPConfig, per_token: bool) -> Tensor:
    """Computes the objective with a loop over positions for multi-token prediction."""
    config, weights = model.config, dict(model.named_parameters())
    head = weights["embedding.word_embeddings.weight" if config.tied_embeddings else "output_layer.weight"]
    mb = model.rotations.attach(batch.context)
    batch_size, seq = batch.tokens_BS.shape
    documents = torch.zeros(batch_size, seq) if mb.tokens.segments_BS is None else mb.tokens.segments_BS
    hidden = run_chain(model._hidden_states(batch.tokens_BS, mb, 0, by_node=False), None).hidden_SBH

    def loss(x: Tensor, label: int, matrix: Tensor) -> Tensor:
        logits = matrix @ x
        return torch.log(torch.exp(logits).sum()) - logits[label]

    def embed(token: int, position: int) -> Tensor:
        x = weights["embedding.word_embeddings.weight"][token]
        if config.position_embedding == "learned_absolute":
            x = x + weights["embedding.position_embeddings.weight"][position]
        return x.detach() if mtp.detach_heads else x

    places = [(b, s) for b in range(batch_size) for s in range(seq)]
    tokens = batch.loss_mask_BS.sum()
    total = sum(batch.loss_mask_BS[b, s] * loss(hidden[s, b], batch.labels_BS[b, s], head) for b, s in places)
    result = total if per_token else total / tokens

    hidden = hidden.detach() if mtp.detach_heads else hidden
    matrix = head.detach() if mtp.detach_heads else head
    for d in range(1, mtp.num_layers + 1):
        name = f"mtp.layers.{0 if mtp.repeated_layer else d - 1}"
        rows = []
        for s in range(seq):
            for b in range(batch_size):
                there = ahead(documents[b].tolist(), s, d)
                e = (
                    embed(0, 0)
                    if there is None
                    else embed(batch.tokens_BS[b, there], batch.context.tokens.positions_BS[b, there])
                )
                e = naive_layers.norm(e, config.norm, weights, f"{name}.enorm")
                h = naive_layers.norm(hidden[s, b], config.norm, weights, f"{name}.hnorm")
                rows.append(weights[f"{name}.eh_proj.weight"] @ torch.cat([e, h]))
        layer = model.get_submodule(f"{name}.transformer_layer")
        out = layer(torch.stack(rows).view(seq, batch_size, -1), mb)
        normed = [naive_layers.norm(x, config.norm, weights, f"{name}.final_layernorm") for x in out.flatten(0, 1)]
        hidden = torch.stack(normed).view_as(out)

        depth_sum, depth_tokens = 0 * hidden.sum(), torch.zeros(()).double()
        for b, s in places:
            there = ahead(documents[b].tolist(), s, d)
            if there is not None:
                weight = batch.loss_mask_BS[b, there]
                depth_sum = depth_sum + weight * loss(hidden[s, b], batch.labels_BS[b, there], matrix)
                depth_tokens = depth_tokens + weight
        share = mtp.loss_scaling_factor / mtp.num_layers * depth_sum / depth_tokens.clamp(min=1)
        result = result + (share * tokens if per_token else share)
    return result


CASES = {
    "one depth": (MTPConfig(num_layers=1), {}, {}),
    "three depths": (MTPConfig(num_layers=3, loss_scaling_factor=0.3), {}, {}),
    "repeated layer": (MTPConfig(num_layers=2, repeated_layer=True), {}, {}),
    "detached": (MTPConfig(num_layers=2, detach_heads=True), {}, {}),
    "detached and tied": (MTPConfig(num_layers=1, detach_heads=True), {"tied_embeddings": True}, {}),
    "tied": (MTPConfig(num_layers=2), {"tied_embeddings": True}, {}),
    "learned positions": (MTPConfig(num_layers=2), {"position_embedding": "learned_absolute"}, {}),
    "documents": (MTPConfig(num_layers=2), {}, {"segments_BS": SEGMENTS, "positions_BS": POSITIONS}),
    "documents with learned positions": (
        MTPConfig(num_layers=2),
        {"position_embedding": "learned_absolute"},
        {"segments_BS": SEGMENTS, "positions_BS": POSITIONS},
    ),
    "more depths than tokens of some documents": (
        MTPConfig(num_layers=6),
        {},
        {"segments_BS": SEGMENTS, "positions_BS": POSITIONS},
    ),
}


@pytest.mark.parametrize(("mtp", "changes", "tokens"), CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("per_token", [False, True])
def test_objective_and_gradients_equal_the_loop(mtp, changes, tokens, per_token):
    model = build(model_config(layer_config(), layer_config(mla_config()), mtp=mtp, **changes))
    batch = microbatch(2, 8, **tokens)

    scalar, _ = training_objective(model(batch), batch, mtp=mtp, per_token=per_token)
    scalar.backward()
    actual = gradients(model)
    model.zero_grad()
    expected = loss_by_loop(model, batch, mtp, per_token)
    expected.backward()

    FP64_REF.check(scalar, expected, "objective")
    FP64_REF.check_all(actual, gradients(model), "gradients")


def test_detached_heads_do_not_change_the_gradients_of_the_model():
    config = model_config(mtp=MTPConfig(num_layers=2, detach_heads=True))
    model, batch = build(config), microbatch()
    with_mtp = training_objective(model(batch), batch, mtp=config.mtp, per_token=False)[0]
    with_mtp.backward()
    with_mtp_grads = gradients(model)
    model.zero_grad()
    training_objective(model(batch), batch, mtp=None, per_token=False)[0].backward()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert not any(name.startswith("mtp.") for name in own)
    EXACT.check_all({name: with_mtp_grads[name] for name in own}, own, "gradients of the model")


def test_a_fully_masked_microbatch_gives_zero_and_no_nan():
    config = model_config(mtp=MTPConfig(num_layers=2))
    model, batch = build(config), microbatch()
    batch = replace(batch, loss_mask_BS=torch.zeros_like(batch.loss_mask_BS))
    for per_token in (False, True):
        scalar, sums = training_objective(model(batch), batch, mtp=config.mtp, per_token=per_token)
        scalar.backward()
        EXACT.check(torch.stack([scalar, *sums["lm loss"]]), torch.zeros(3).double(), "objective")
    assert all(not p.grad.any() for p in model.parameters())


def test_losses_of_all_depths_are_recorded():
    config, metrics = model_config(mtp=MTPConfig(num_layers=2)), MetricAccumulator()
    model, batch = build(config), microbatch(metrics=metrics)
    output = model(batch)
    training_objective(output, batch, mtp=config.mtp, per_token=False)
    for depth, (loss_BS, weights_BS, _) in enumerate(output.mtp_losses, start=1):
        entry = metrics.entries[f"mtp_{depth} loss", None]
        FP64_REF.check(entry.value / entry.count, (loss_BS * weights_BS).sum() / weights_BS.sum(), f"depth {depth}")


def test_evaluation_has_no_multi_token_prediction():
    model, batch = build(model_config(mtp=MTPConfig(num_layers=2))), microbatch()
    output = model(replace(batch, context=replace(batch.context, training=False)))
    assert output.mtp_losses == ()
    EXACT.check(output.loss_BS, model(batch).loss_BS, "loss")


def test_depths_of_a_repeated_layer_have_different_dropout():
    config = model_config(layer_config(hidden_dropout=0.3), mtp=MTPConfig(num_layers=2, repeated_layer=True))
    model = build(config)
    keys = []
    model.mtp.layers["0"].transformer_layer.self_attention.register_forward_pre_hook(
        lambda _, args: keys.append(args[1].rng)
    )
    model(microbatch(rng=RNGKey(1, 2, 3)))
    assert len(set(keys)) == 2, keys


@pytest.mark.parametrize("repeated", [False, True])
def test_a_repeated_layer_divides_its_balancing_losses_by_the_depths(repeated):
    model = build(model_config(mtp=MTPConfig(num_layers=4, repeated_layer=repeated)))
    scales = []
    for layer in model.mtp.layers.values():
        layer.transformer_layer.self_attention.register_forward_pre_hook(
            lambda _, args: scales.append(args[1].aux_loss_scale)
        )
    model(microbatch(aux_loss_scale=0.5))
    assert scales == [0.125 if repeated else 0.5] * 4


def test_validity_is_shifted_at_every_depth():
    model, seen = build(model_config(mtp=MTPConfig(num_layers=2))), []
    for layer in model.mtp.layers.values():
        layer.transformer_layer.self_attention.register_forward_pre_hook(
            lambda _, args: seen.append(args[1].tokens.valid_BS[0].tolist())
        )
    valid_BS = torch.tensor([[True, True, True, True, False, False]])
    model(microbatch(1, 6, valid_BS=valid_BS))
    assert seen == [[True] * 3 + [False] * 3, [True] * 2 + [False] * 4]
    seen.clear()
    model(microbatch(1, 6, valid_BS=torch.ones(1, 6, dtype=torch.bool)))
    assert seen == [[True] * 6] * 2


def test_shift_moves_every_document_left_by_one_position():
    x_BS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]])
    assert shift_left(x_BS, None).tolist() == [[2, 3, 4, 5, 6, 7, 8, 0], [12, 13, 14, 15, 16, 17, 18, 0]]
    assert shift_left(x_BS, SEGMENTS, fill=9).tolist() == [[2, 3, 9, 5, 6, 7, 9, 9], [12, 13, 14, 15, 16, 9, 18, 9]]
