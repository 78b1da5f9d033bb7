"""Stages joined by bytes compute what one process computes, and can be stopped and continued anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.config.spec import WireDtype
from swarm.model.init import seeded_basis
from swarm.model.reference import ReferenceTrainer
from swarm.model.trainer import StageTrainer
from tests.model.runs import Chain, RandomTokens, small_run

KINDS = ["dense", "subspace", "anchored"]
DTYPES = [dtype.value for dtype in WireDtype]


def reference(spec) -> ReferenceTrainer:
    return ReferenceTrainer(spec, RandomTokens(spec), device="cpu")


def losses(trainer: Chain | ReferenceTrainer, steps: int) -> list[float]:
    if isinstance(trainer, Chain):
        return [trainer.step() for _ in range(steps)]
    return [trainer.step().loss for _ in range(steps)]


def gradients(chain: Chain) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for stage in chain.stages for name, p in stage.optimizer.parameters.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_over_bytes_has_the_losses_of_the_reference(kind, dtype):
    spec = small_run(kind, dtype)
    chain, whole = Chain(spec), reference(spec)
    expected = losses(whole, 3)
    assert losses(chain, 3) == pytest.approx(expected, rel=1e-6)
    assert expected[0] != pytest.approx(expected[2], rel=1e-4)
    parameters = {name: p for stage in whole.stages for name, p in stage.named_parameters()}
    for stage in chain.stages:
        for name, parameter in stage.optimizer.parameters.items():
            torch.testing.assert_close(parameter, parameters[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fields", [{"rank": 0}, {"rank": 3}, {"learned_basis": True}])
def test_so_it_has_with_a_cut_wire_an_odd_rank_and_a_learned_basis(fields):
    spec = small_run("anchored", "int4", boundary=fields)
    assert losses(Chain(spec), 3) == pytest.approx(losses(reference(spec), 3), rel=1e-6)


def test_a_cut_wire_carries_nothing_to_the_stages_before_the_last():
    spec = small_run("anchored", boundary={"rank": 0})
    chain = Chain(spec)
    chain.microbatch(1, 0)
    assert [stage.squared_norm() > 0 for stage in chain.stages] == [False, False, True]


@pytest.mark.parametrize("rank", [0, 1, 2, 4])
def test_the_rank_is_a_property_of_each_message(rank):
    spec = small_run("anchored", "bf16", boundary={"ladder": (4, 2, 1, 0)})
    loss = Chain(spec).microbatch(1, 0, rank)
    expected = float(reference(spec).loss(RandomTokens(spec).microbatch(1, 0), rank).detach())
    assert loss == pytest.approx(expected, rel=1e-6)


def test_a_learned_basis_is_trained_on_both_sides_up_to_the_rank_of_the_messages():
    chain = Chain(small_run("anchored", boundary={"learned_basis": True, "ladder": (4, 3)}))
    chain.microbatch(1, 0, rank=3)
    for name, axis in (("bases.0_encode", 1), ("bases.1_decode", 0), ("bases.1_encode", 1), ("bases.2_decode", 0)):
        gradient = gradients(chain)[name]
        assert gradient is not None
        assert [bool((column != 0).any()) for column in gradient.unbind(axis)] == [True, True, True, False]
    before = {n: p.detach().clone() for s in chain.stages for n, p in s.optimizer.parameters.items()}
    u = seeded_basis(chain.spec)
    assert torch.equal(before["bases.0_encode"], u)
    assert torch.equal(before["bases.1_decode"], u.T)
    for stage in chain.stages:
        stage.apply(1.0)
    after = {n: p for s in chain.stages for n, p in s.optimizer.parameters.items()}
    for name in ("bases.0_encode", "bases.1_decode", "bases.1_encode", "bases.2_decode"):
        assert not torch.equal(after[name], before[name])


@pytest.mark.parametrize("kind", KINDS)
def test_computing_the_forward_again_gives_the_same_gradient_to_the_bit(kind):
    spec = small_run(kind, "int8")
    chains = Chain(spec), Chain(spec, recompute=True)
    for chain in chains:
        for index in range(2):
            chain.microbatch(1, index)
    kept, recomputed = map(gradients, chains)
    for name, gradient in kept.items():
        assert gradient is not None
        assert recomputed[name] is not None
        assert torch.equal(gradient, recomputed[name])


def test_recomputing_keeps_the_compressed_input_only():
    spec = small_run()
    middle = StageTrainer(spec, 1, device="cpu", recompute=True)
    sent = StageTrainer(spec, 0, device="cpu").forward(
        1, 0, tokens=RandomTokens(spec).microbatch(1, 0), rank=4, dtype=WireDtype.FP32
    )
    middle.forward(1, 0, inbound=sent, rank=4, dtype=WireDtype.FP32)
    # 2 x 8 tokens of 4 fp32 coefficients, and 2 x 9 token ids of one byte.
    assert middle.in_flight_bytes == 2 * 8 * 4 * 4 + 2 * 9
    assert middle._in_flight[1, 0].left is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_taken_after_a_step_continues_to_the_bit(kind):
    spec = small_run(kind, "bf16", boundary={"learned_basis": kind == "anchored"})
    straight, first, second = Chain(spec), Chain(spec), Chain(spec)
    expected = losses(straight, 3)
    losses(first, 1)
    losses(second, 2)
    for source, target in zip(first.stages, second.stages, strict=True):
        target.load_state(source.state())
        assert (target.version, target.digest()) == (1, source.digest())
    assert losses(second, 2) == expected[1:]
    assert [stage.digest() for stage in second.stages] == [stage.digest() for stage in straight.stages]


def test_a_state_is_a_copy():
    chain = Chain(small_run())
    losses(chain, 1)
    state = chain.stages[0].state()
    before = {name: tensor.clone() for name, tensor in state.items()}
    losses(chain, 1)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_loading_a_state_drops_what_is_in_flight():
    chain = Chain(small_run())
    chain.microbatch(1, 0)
    stage = chain.stages[0]
    stage.load_state(stage.initial_state())
    assert (stage.squared_norm(), stage.in_flight_bytes, stage.version) == (0.0, 0, 0)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_initial_state_is_derived_from_the_seed(stage):
    chain = Chain(small_run())
    fresh = chain.stages[stage].digest()
    losses(chain, 2)
    trainer = chain.stages[stage]
    assert trainer.digest() != fresh
    trainer.load_state(trainer.initial_state())
    assert (trainer.digest(), trainer.version) == (fresh, 0)


def test_a_scale_of_zero_skips_the_update_and_counts_the_step():
    chain = Chain(small_run())
    chain.microbatch(1, 0)
    for stage in chain.stages:
        before = stage.digest()
        stage.apply(0.0)
        assert (stage.digest(), stage.version, stage.squared_norm()) == (before, 1, 0.0)


def test_discarding_drops_the_gradient_of_the_step():
    chain = Chain(small_run())
    expected = chain.microbatch(1, 0)
    norms = [stage.squared_norm() for stage in chain.stages]
    for stage in chain.stages:
        stage.discard()
    assert chain.microbatch(1, 0) == expected
    assert [stage.squared_norm() for stage in chain.stages] == norms


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_has_the_loss_of_the_reference_and_leaves_nothing(kind):
    spec = small_run(kind)
    chain = Chain(spec)
    total = 0.0
    for index in range(2):
        left = None
        for number, stage in enumerate(chain.stages):
            tokens = chain.source.validation(index) if number == 0 else None
            left = stage.evaluate(index, tokens=tokens, inbound=left, rank=spec.wire_rank, dtype=WireDtype.FP32)
        total += left
    assert total / 2 == pytest.approx(reference(spec).validate(), rel=1e-6)
    assert all(stage.squared_norm() == 0 and stage.in_flight_bytes == 0 for stage in chain.stages)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_one_stage_alone_is_the_reference(kind, tied):
    spec = small_run(kind, model={"stages": 1, "tied_head": tied})
    assert losses(Chain(spec), 3) == pytest.approx(losses(reference(spec), 3), rel=1e-6)


def test_training_on_the_same_batch_lowers_its_loss():
    spec = small_run("anchored", "int8", optimizer={"warmup_steps": 0, "lr": 1e-2})
    chain = Chain(spec)
    tokens = chain.source.microbatch(1, 0)
    chain.source.microbatch = lambda step, index: np.asarray(tokens)
    seen = losses(chain, 6)
    assert seen[-1] < seen[0] - 0.5
