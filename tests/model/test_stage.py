"""Cutting the model into stages changes neither its weights nor what it computes."""

from __future__ import annotations

import math

import pytest
import torch

from swarm.errors import UsageError
from swarm.model.device import choose_device
from swarm.model.init import seeded_anchor
from swarm.model.stage import StageModel, token_loss
from tests.model.runs import RandomTokens, small_run


def parameters(spec) -> dict[str, torch.Tensor]:
    stages = [StageModel(spec, stage) for stage in range(spec.model.stages)]
    named = [pair for stage in stages for pair in stage.named_parameters()]
    assert len({name for name, _ in named}) == len(named)
    return dict(named)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> set[str]:
    """Names in both; their values must agree."""
    for name in a.keys() & b.keys():
        assert torch.equal(a[name], b[name]), name
    return a.keys() & b.keys()


def test_dense_stages_have_the_parameters_of_the_whole_model():
    cut, whole = parameters(small_run("dense")), parameters(small_run("dense", model={"stages": 1}))
    assert same(cut, whole) == cut.keys() == whole.keys()


def test_anchored_stages_add_only_their_anchors():
    cut, whole = parameters(small_run("anchored")), parameters(small_run("anchored", model={"stages": 1}))
    assert same(cut, whole) == whole.keys()
    assert cut.keys() - whole.keys() == {"anchors.1", "anchors.2"}


def test_subspace_layers_do_not_depend_on_the_cut_either():
    four, two = (parameters(small_run("subspace", model={"layers": 4, "stages": n})) for n in (4, 2))
    unconstrained = {name for name in four if name.startswith(("layers.2", "layers.3"))}
    shared = {name: tensor for name, tensor in four.items() if name not in unconstrained}
    assert same(shared, two) == shared.keys()
    assert "embedding.coefficients" in shared


def test_anchors_and_embedding_have_unit_rms():
    named = parameters(small_run("anchored"))
    for name in ("embedding.weight", "anchors.1", "anchors.2"):
        assert float(named[name].detach().pow(2).mean().sqrt()) == pytest.approx(1, abs=0.03)
    assert float(seeded_anchor(small_run("subspace")).pow(2).mean().sqrt()) == pytest.approx(1, abs=0.03)


def test_a_chain_of_dense_stages_equals_the_whole_model():
    spec = small_run("dense")
    ids = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))[:, :-1]
    with torch.no_grad():
        whole = StageModel(small_run("dense", model={"stages": 1}), 0)(None, ids, 16)
        c = None
        for stage in range(3):
            c = StageModel(spec, stage)(c, ids, 16)
    torch.testing.assert_close(c, whole, atol=1e-5, rtol=1e-5)


def test_a_token_does_not_see_those_after_it():
    spec = small_run("dense", model={"stages": 1})
    model = StageModel(spec, 0)
    ids = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))[:, :-1]
    other = ids.clone()
    other[:, 5] = (other[:, 5] + 1) % 256
    with torch.no_grad():
        before, after = model(None, ids, 16), model(None, other, 16)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["dense", "subspace", "anchored"])
def test_training_begins_near_the_loss_of_a_uniform_guess(kind, tied):
    spec = small_run(kind, model={"stages": 1, "d_model": 64, "tied_head": tied})
    ids = torch.from_numpy(RandomTokens(spec).microbatch(1, 0))
    with torch.no_grad():
        loss = token_loss(StageModel(spec, 0)(None, ids[:, :-1], 4), ids[:, 1:])
    assert float(loss) == pytest.approx(math.log(256), abs=0.3)


def test_a_tied_head_is_the_embedding():
    model = StageModel(small_run("dense", model={"stages": 1, "tied_head": True}), 0)
    names = dict(model.named_parameters())
    assert "head.weight" not in names
    assert "embedding.weight" in names


def test_the_automatic_device_is_the_accelerator_or_the_cpu():
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    assert choose_device() == (accelerator or torch.device("cpu"))
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["abacus", "cuda:99", "cpu:zero"])
def test_a_device_that_is_not_here_is_a_usage_error(name):
    with pytest.raises(UsageError, match=rf"no device '{name}' here.*--device auto, or one of: cpu"):
        choose_device(name)
