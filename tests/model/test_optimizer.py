"""The learning rate of a step, what decays, and what a step does."""

from __future__ import annotations

import pytest
import torch

from swarm.config.spec import RunSpec
from swarm.model.optimizer import Optimizer, decays, learning_rate
from swarm.model.stage import StageModel
from tests.model.runs import small_run


@pytest.mark.parametrize(
    ("step", "rate"), [(1, 1.5e-4), (10, 1.5e-3), (20, 3e-3), (210, 1.65e-3), (400, 3e-4), (500, 3e-4)]
)
def test_the_rate_rises_linearly_and_falls_along_a_cosine(step, rate):
    assert learning_rate(RunSpec(steps=400), step) == pytest.approx(rate, rel=1e-9)


def test_without_warmup_the_first_step_has_almost_the_full_rate():
    spec = RunSpec.parse({"steps": 400, "optimizer": {"warmup_steps": 0}})
    assert learning_rate(spec, 1) == pytest.approx(3e-3, rel=1e-4)


def test_a_run_shorter_than_its_warmup_still_has_a_rate():
    spec = RunSpec(steps=5)
    assert [learning_rate(spec, step) for step in (1, 5, 20, 21)] == pytest.approx([1.5e-4, 7.5e-4, 3e-3, 3e-4])


def test_only_matrices_that_are_not_looked_up_decay():
    spec = small_run("anchored", boundary={"learned_basis": True})
    named = [pair for stage in range(3) for pair in StageModel(spec, stage).named_parameters()]
    decaying = {name for name, parameter in named if decays(name, parameter)}
    matrices = ("attention.qkv.weight", "attention.out.weight", "ffn.gate_up.weight", "ffn.down.weight")
    assert decaying == {f"layers.{layer}.{name}" for layer in range(3) for name in matrices} | {"head.weight"}


def test_with_no_gradient_a_step_only_decays():
    spec = small_run()
    model = StageModel(spec, 1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = Optimizer(model, spec)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(2, 1.0)
    shrunk = 1 - learning_rate(spec, 2) * 0.1
    for name, parameter in model.named_parameters():
        factor = shrunk if decays(name, parameter) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-6, atol=0)
        assert parameter.grad is None


def test_the_squared_norm_is_over_all_gradients():
    model = torch.nn.Linear(2, 2)
    optimizer = Optimizer(model, small_run())
    assert optimizer.squared_norm() == 0.0
    model.weight.grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    model.bias.grad = torch.tensor([5.0, 6.0])
    assert optimizer.squared_norm() == pytest.approx(91.0)


def test_clipping_scales_the_gradient_before_the_moments():
    spec = small_run()
    moments = []
    for gradient, scale in ((2.0, 0.5), (1.0, 1.0)):
        model = torch.nn.Linear(2, 2, bias=False)
        optimizer = Optimizer(model, spec)
        model.weight.grad = torch.full((2, 2), gradient)
        optimizer.step(1, scale)
        moments.append(optimizer.state()["exp_avg/weight"])
    assert torch.equal(moments[0], moments[1])
    assert float(moments[0][0, 0]) == pytest.approx(0.1)
