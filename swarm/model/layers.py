"""The layers of a Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from swarm.config.spec import ModelSpec


class FactoredLinear(nn.Module):
    """``y = (x Aᵀ) Uᵀ``: a projection that can only write into the span of the fixed basis ``U`` (d_model, K).

    This is how ``subspace`` keeps the residual stream compressible by construction (Protocol Models,
    arXiv 2506.01260): no projection after the optimizer step, and A has K/d_model of the weights.
    """

    def __init__(self, inputs: int, basis: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(basis.shape[1], inputs))
        self.basis: Tensor
        self.register_buffer("basis", basis, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.weight), self.basis)


def output_projection(inputs: int, outputs: int, basis: Tensor | None) -> nn.Module:
    """A projection into the residual stream, constrained to ``basis`` if one is given."""
    return nn.Linear(inputs, outputs, bias=False) if basis is None else FactoredLinear(inputs, basis)


def rotary_tables(model: ModelSpec) -> tuple[Tensor, Tensor]:
    """cos and sin, each (context, head_dim), of the half-rotation form (Su et al., arXiv 2104.09864)."""
    half = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    angles = torch.outer(torch.arange(model.context, dtype=torch.float64), model.rope_theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().float(), angles.sin().float()


def rotate(x_bhtd: Tensor, cos_td: Tensor, sin_td: Tensor) -> Tensor:
    """Apply the rotation of each position to queries or keys."""
    first, second = x_bhtd.chunk(2, dim=-1)
    return x_bhtd * cos_td + torch.cat((-second, first), dim=-1) * sin_td


class Attention(nn.Module):
    """Causal grouped-query attention: (batch, time, d_model) to the same."""

    def __init__(self, model: ModelSpec, basis: Tensor | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = model.heads, model.kv_heads, model.head_dim
        self.qkv = nn.Linear(model.d_model, (model.heads + 2 * model.kv_heads) * model.head_dim, bias=False)
        self.out = output_projection(model.heads * model.head_dim, model.d_model, basis)

    def forward(self, x_btd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, time, _ = x_btd.shape
        qkv = self.qkv(x_btd).view(batch, time, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        qk = rotate(qk, cos[:time], sin[:time])
        q, k = qk.split((self.heads, self.kv_heads), dim=1)
        groups = self.heads // self.kv_heads
        if groups > 1:
            k = k.repeat_interleave(groups, dim=1)
            v = v.repeat_interleave(groups, dim=1)
        y = F.scaled_dot_product_attention(q, k, v.to(q.dtype), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    def __init__(self, model: ModelSpec, basis: Tensor | None) -> None:
        super().__init__()
        self.gate_up = nn.Linear(model.d_model, 2 * model.ffn, bias=False)
        self.down = output_projection(model.ffn, model.d_model, basis)

    def forward(self, x_btd: Tensor) -> Tensor:
        gate, up = self.gate_up(x_btd).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """One transformer layer with pre-normalisation."""

    def __init__(self, model: ModelSpec, basis: Tensor | None = None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.attention = Attention(model, basis)
        self.ffn_norm = nn.RMSNorm(model.d_model, eps=model.norm_eps)
        self.ffn = FeedForward(model, basis)

    def forward(self, x_btd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_btd = x_btd + self.attention(self.attention_norm(x_btd), cos, sin)
        return x_btd + self.ffn(self.ffn_norm(x_btd))
