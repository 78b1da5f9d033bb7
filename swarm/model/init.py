"""Initial weights, bases and anchors: derived from the run's seed, never sent.

Each tensor has a generator of its own, seeded by the run's seed and a name that says where it is in the whole model
(``layers.3.attention.qkv.weight``), so the values do not depend on how the layers are cut into stages.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from swarm.config.spec import RunSpec


def seeded_normal(seed: int, name: str, *shape: int) -> Tensor:
    """Standard normal values (fp32, CPU) that depend on ``seed`` and ``name`` alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(*shape, generator=generator)


def seeded_basis(spec: RunSpec) -> Tensor:
    """The orthonormal basis U (d_model, K) that all boundaries share."""
    rows, rank = spec.model.d_model, spec.boundary.rank
    if rank == 0:
        return torch.zeros(rows, 0)
    gaussian = seeded_normal(spec.seed, "basis", rows, rank).double()
    q, r = torch.linalg.qr(gaussian)
    # The factorisation is unique once the diagonal of R is positive, whatever library computed it.
    return (q * torch.sign(torch.diagonal(r))).float()


def seeded_anchor(spec: RunSpec) -> Tensor:
    """The fixed anchor of ``subspace`` (vocab, d_model), at unit RMS."""
    return seeded_normal(spec.seed, "anchor", spec.model.vocab_size, spec.model.d_model)


@torch.no_grad()
def initialise(module: nn.Module, spec: RunSpec) -> None:
    """Fill every parameter from its name; names are those of the whole model (see ``StageModel``)."""
    residual = (2 * spec.model.layers) ** -0.5
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
            continue
        values = seeded_normal(spec.seed, name, *parameter.shape)
        if name.startswith("anchors.") or name == "embedding.weight":
            # As a head, unit RMS would begin tens of nats above a uniform guess.
            scale = 0.02 if spec.model.tied_head else 1.0
        elif name == "embedding.coefficients" or name == "head.weight":
            scale = 0.02
        elif name.startswith("bases."):
            # A learned basis starts as the seeded one: the first is d_model x K, the second its transpose.
            basis = seeded_basis(spec)
            parameter.copy_(basis if name.endswith("encode") else basis.T)
            continue
        else:
            scale = parameter.shape[-1] ** -0.5
            if name.endswith(("attention.out.weight", "ffn.down.weight")):
                scale *= residual
        parameter.copy_(values * scale)
