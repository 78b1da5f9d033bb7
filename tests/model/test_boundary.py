"""What a boundary does to activations and their gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from swarm.config.spec import BoundaryKind
from swarm.model.boundary import DenseBoundary, ProjectedBoundary
from swarm.model.init import seeded_basis
from swarm.model.stage import StageModel
from tests.model.runs import RandomTokens, small_run

D, K = 6, 4


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def basis() -> torch.Tensor:
    return torch.linalg.qr(values(D, K, seed=9)).Q


def projected(learned: bool) -> ProjectedBoundary:
    if not learned:
        return ProjectedBoundary(basis())
    return ProjectedBoundary(basis(), nn.Parameter(values(D, K, seed=1)), nn.Parameter(values(K, D, seed=2)))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("rank", range(K + 1))
def test_the_gradient_of_a_projected_boundary_is_exact_at_every_rank(rank, learned):
    boundary = projected(learned)
    inputs = [values(2, 3, D, seed=seed).requires_grad_() for seed in (3, 4, 5)]
    parameters = [p for p in boundary._learned if p is not None]

    def crossed(x, sender_anchor, receiver_anchor, *_):
        return boundary.decode(boundary.encode(x, sender_anchor, rank), receiver_anchor)

    assert torch.autograd.gradcheck(crossed, (*inputs, *parameters))


def test_the_gradient_of_a_dense_boundary_is_the_identity():
    x = values(2, 3, D).requires_grad_()
    boundary = DenseBoundary()
    assert torch.autograd.gradcheck(lambda x: boundary.decode(boundary.encode(x, None, D), None), (x,))


@pytest.mark.parametrize("rank", range(K + 1))
def test_encode_and_decode_are_the_formulas_of_the_design(rank):
    boundary, u = projected(learned=False), basis()
    x, sender, receiver = (values(2, 3, D, seed=seed) for seed in (3, 4, 5))
    c = boundary.encode(x, sender, rank)
    torch.testing.assert_close(c, (x - sender) @ u[:, :rank])
    torch.testing.assert_close(boundary.decode(c, receiver), receiver + c @ u[:, :rank].T)


@pytest.mark.parametrize("learned", [False, True])
def test_a_message_of_a_lower_rank_is_a_prefix(learned):
    boundary, x, anchor = projected(learned), values(2, 3, D), values(2, 3, D, seed=1)
    whole = boundary.encode(x, anchor, K)
    for rank in range(K + 1):
        torch.testing.assert_close(boundary.encode(x, anchor, rank), whole[..., :rank])


def test_rank_zero_leaves_the_anchor_alone():
    boundary, anchor = projected(learned=False), values(2, 3, D)
    nothing = torch.zeros(2, 3, 0, dtype=torch.float64)
    assert torch.equal(boundary.decode(nothing, anchor), anchor)
    assert torch.equal(boundary.decode(nothing, None), torch.zeros(2, 3, D, dtype=torch.float64))


def test_the_seeded_basis_is_orthonormal_and_depends_on_the_seed():
    spec = small_run()
    u = seeded_basis(spec)
    torch.testing.assert_close(u.T @ u, torch.eye(4), atol=1e-6, rtol=0)
    assert torch.equal(u, seeded_basis(spec))
    assert not torch.allclose(u, seeded_basis(spec.model_copy(update={"seed": 4})))


@pytest.mark.parametrize("stage", [0, 1])
def test_subspace_at_full_rank_loses_nothing(stage):
    spec = small_run("subspace")
    tokens = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))[:, :-1]
    sender, receiver = StageModel(spec, stage), StageModel(spec, stage + 1)
    entering = None if stage == 0 else torch.randn(*tokens.shape, spec.wire_rank)
    # Any weights will do, not only the initial ones.
    with torch.no_grad():
        for parameter in sender.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
        left = sender.body(sender.enter(entering, tokens)[0])
        arrived, _ = receiver.enter(sender(entering, tokens, spec.wire_rank), tokens)
    torch.testing.assert_close(arrived, left, atol=1e-5, rtol=1e-5)


def test_anchored_loses_what_is_outside_of_the_basis():
    spec = small_run("anchored")
    tokens = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))[:, :-1]
    sender, receiver = StageModel(spec, 0), StageModel(spec, 1)
    with torch.no_grad():
        left, anchor = sender.enter(None, tokens)
        left = sender.body(left)
        arrived, own = receiver.enter(sender(None, tokens, 4), tokens)
        u = seeded_basis(spec)
        torch.testing.assert_close(arrived - own, (left - anchor) @ u @ u.T, atol=1e-5, rtol=1e-5)
        assert float((left - anchor - (arrived - own)).abs().max()) > 1e-3


@pytest.mark.parametrize("kind", list(BoundaryKind))
def test_what_crosses_has_the_rank_of_the_message(kind):
    spec = small_run(kind.value)
    tokens = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))[:, :-1]
    rank = 16 if kind is BoundaryKind.DENSE else 3
    assert StageModel(spec, 0)(None, tokens, rank).shape == (2, 8, rank)
