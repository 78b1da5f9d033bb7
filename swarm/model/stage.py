"""One stage of the model: a contiguous range of layers between two boundaries."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swarm.config.spec import BoundaryKind, RunSpec
from swarm.model.boundary import DenseBoundary, ProjectedBoundary, lookup
from swarm.model.init import initialise, seeded_anchor, seeded_basis
from swarm.model.layers import Block, rotary_tables


class FactoredEmbedding(nn.Module):
    """``subspace``: the seeded fixed anchor plus learned coefficients in the span of U."""

    def __init__(self, anchor: Tensor, basis: Tensor) -> None:
        super().__init__()
        self.coefficients = nn.Parameter(torch.empty(anchor.shape[0], basis.shape[1]))
        self.basis: Tensor
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, tokens_bt: Tensor, anchor_btd: Tensor) -> Tensor:
        return anchor_btd + F.embedding(tokens_bt, self.coefficients) @ self.basis.T


class StageModel(nn.Module):
    """The layers of ``stage``, with the embedding on stage 0 and norm and head on the last.

    Parameter names are those of the whole model (``layers.3.…``, ``anchors.1``), whatever the cut.
    """

    def __init__(self, spec: RunSpec, stage: int) -> None:
        super().__init__()
        model, boundary = spec.model, spec.boundary
        self.spec, self.stage = spec, stage
        self.fixed_anchor: Tensor
        self.cos: Tensor
        self.sin: Tensor
        self.inbound: DenseBoundary | ProjectedBoundary
        self.outbound: DenseBoundary | ProjectedBoundary
        self.first, self.last = stage == 0, stage == model.stages - 1
        kind = boundary.kind
        subspace = kind is BoundaryKind.SUBSPACE
        basis = seeded_basis(spec) if kind is not BoundaryKind.DENSE else torch.empty(0, 0)
        self.anchors = nn.ParameterDict()
        self.bases = nn.ParameterDict()
        if subspace:
            self.register_buffer("fixed_anchor", seeded_anchor(spec), persistent=False)
        if self.first:
            if subspace and not self.last:
                self.embedding: FactoredEmbedding | nn.Embedding = FactoredEmbedding(self.fixed_anchor, basis)
            else:
                self.embedding = nn.Embedding(model.vocab_size, model.d_model)
        elif kind is BoundaryKind.ANCHORED:
            self.anchors[str(stage)] = nn.Parameter(torch.empty(model.vocab_size, model.d_model))
        constrained = basis if subspace and not self.last else None
        self.layers = nn.ModuleDict({str(index): Block(model, constrained) for index in model.stage_layers(stage)})
        if self.last:
            self.norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
            if not model.tied_head:
                self.head = nn.Linear(model.d_model, model.vocab_size, bias=False)
        self.inbound, self.outbound = self._boundaries(spec, basis)
        cos, sin = rotary_tables(model)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        initialise(self, spec)

    def _boundaries(
        self, spec: RunSpec, basis: Tensor
    ) -> tuple[DenseBoundary | ProjectedBoundary, DenseBoundary | ProjectedBoundary]:
        if spec.boundary.kind is BoundaryKind.DENSE:
            return DenseBoundary(), DenseBoundary()
        encoder = decoder = None
        if spec.boundary.learned_basis:
            if not self.last:
                encoder = self.bases[f"{self.stage}_encode"] = nn.Parameter(torch.empty_like(basis))
            if not self.first:
                decoder = self.bases[f"{self.stage}_decode"] = nn.Parameter(torch.empty_like(basis.T))
        return ProjectedBoundary(basis, decoder=decoder), ProjectedBoundary(basis, encoder=encoder)

    def enter(self, c_btr: Tensor | None, tokens_bt: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream at the stage's first layer, and the stage's anchor for these tokens.

        Args:
            c_btr: decoded coefficients of the boundary before; None on stage 0.
            tokens_bt: input token ids, (batch, time).
        """
        kind = self.spec.boundary.kind
        anchor = lookup(self.fixed_anchor, tokens_bt) if kind is BoundaryKind.SUBSPACE else None
        if self.first:
            if isinstance(self.embedding, FactoredEmbedding):
                assert anchor is not None
                return self.embedding(tokens_bt, anchor), anchor
            x = self.embedding(tokens_bt)
            return x, x if kind is BoundaryKind.ANCHORED else anchor
        assert c_btr is not None
        if kind is BoundaryKind.ANCHORED:
            anchor = lookup(self.anchors[str(self.stage)], tokens_bt)
        return self.inbound.decode(c_btr, anchor), anchor

    def body(self, x_btd: Tensor) -> Tensor:
        """All layers of the stage."""
        for layer in self.layers.values():
            x_btd = layer(x_btd, self.cos, self.sin)
        return x_btd

    def forward(self, c_btr: Tensor | None, tokens_bt: Tensor, rank: int) -> Tensor:
        """Coefficients for the next stage, (batch, time, rank); on the last stage the logits, (batch, time, vocab)."""
        x, anchor = self.enter(c_btr, tokens_bt)
        x = self.body(x)
        if not self.last:
            return self.outbound.encode(x, anchor, rank)
        x = self.norm(x)
        if self.spec.model.tied_head:
            assert isinstance(self.embedding, nn.Embedding)
            return F.linear(x, self.embedding.weight)
        return self.head(x)


def token_loss(logits_btv: Tensor, targets_bt: Tensor) -> Tensor:
    """Mean cross entropy in nats per token, computed in fp32."""
    return F.cross_entropy(logits_btv.float().flatten(0, 1), targets_bt.flatten())
