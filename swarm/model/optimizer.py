"""AdamW with warmup and cosine decay, driven by the step number alone."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from swarm.config.spec import RunSpec


def learning_rate(spec: RunSpec, step: int) -> float:
    """Learning rate of ``step`` (from 1): linear warmup, then cosine to ``min_lr_share`` of the peak at the end."""
    o = spec.optimizer
    if step <= o.warmup_steps:
        return o.lr * step / o.warmup_steps
    progress = min(1.0, (step - o.warmup_steps) / max(1, spec.steps - o.warmup_steps))
    return o.lr * (o.min_lr_share + (1 - o.min_lr_share) * (1 + math.cos(math.pi * progress)) / 2)


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices that are not looked up by token."""
    return parameter.ndim > 1 and not name.startswith(("anchors.", "embedding.", "bases."))


class Optimizer:
    """AdamW over named parameters, with a state that is a flat dictionary of tensors."""

    def __init__(self, module: nn.Module, spec: RunSpec) -> None:
        o = spec.optimizer
        self.spec = spec
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        groups = [
            {"params": [p for n, p in self.parameters.items() if decays(n, p)], "weight_decay": o.weight_decay},
            {"params": [p for n, p in self.parameters.items() if not decays(n, p)], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=o.lr,
            betas=(o.beta1, o.beta2),
            eps=o.eps,
            fused=True,
        )

    def squared_norm(self) -> float:
        """Sum of squares of all accumulated gradients, in fp32 per tensor and fp64 in total."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        if not gradients:
            return 0.0
        # One kernel for all tensors; MPS has no fp64.
        norms = torch.stack(torch._foreach_norm(gradients))  # pyright: ignore[reportPrivateImportUsage]
        norms = norms if norms.device.type == "mps" else norms.double()
        return float((norms**2).sum())

    @torch.no_grad()
    def step(self, step: int, clip_scale: float) -> None:
        """Scale the gradients, update with the rate of ``step``, drop the gradients. A scale of 0 updates nothing."""
        if clip_scale > 0:
            if clip_scale < 1:
                gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
                if gradients:  # none at all below a cut wire
                    torch._foreach_mul_(gradients, clip_scale)  # pyright: ignore[reportPrivateImportUsage]
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate(self.spec, step)
            self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def drop_gradients(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """Copies on the CPU of moments and step counts, by parameter name."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            for key, value in self._adamw.state.get(parameter, {}).items():
                tensors[f"{key}/{name}"] = value.detach().to("cpu", copy=True)
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of :meth:`state`; parameters without moments start afresh."""
        self._adamw.state.clear()
        for name, parameter in self.parameters.items():
            if f"exp_avg/{name}" not in tensors:
                continue
            self._adamw.state[parameter] = {
                "step": tensors[f"step/{name}"].to(parameter.device, copy=True),
                "exp_avg": tensors[f"exp_avg/{name}"].to(parameter.device, copy=True),
                "exp_avg_sq": tensors[f"exp_avg_sq/{name}"].to(parameter.device, copy=True),
            }
