"""Boundaries: how the residual stream becomes a few coefficients per token and back (DESIGN.md section 2).

``encode``  c  = (X - A_s(t)) E[:, :r]         on the sender,   (batch, time, d) to (batch, time, r)
``decode``  X' = A_{s+1}(t) + c D[:r, :]       on the receiver, (batch, time, r) to (batch, time, d)

The anchor A is handed in, already looked up for the tokens, since it belongs to the stage.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn
from torch.nn import functional as F


class Boundary(Protocol):
    """One side of a boundary."""

    def encode(self, x_btd: Tensor, anchor_btd: Tensor | None, rank: int) -> Tensor: ...

    def decode(self, c_btr: Tensor, anchor_btd: Tensor | None) -> Tensor: ...


class DenseBoundary(nn.Module):
    """The residual stream itself crosses."""

    def encode(self, x_btd: Tensor, anchor_btd: Tensor | None, rank: int) -> Tensor:
        return x_btd

    def decode(self, c_btr: Tensor, anchor_btd: Tensor | None) -> Tensor:
        return c_btr


class ProjectedBoundary(nn.Module):
    """``subspace`` and ``anchored``: what exceeds the anchor is projected on the first r columns of a basis.

    Args:
        basis: U (d_model, K), orthonormal columns.
        encoder: learned E (d_model, K) of the sending side, else U.
        decoder: learned D (K, d_model) of the receiving side, else Uᵀ.
    """

    def __init__(self, basis: Tensor, encoder: nn.Parameter | None = None, decoder: nn.Parameter | None = None) -> None:
        super().__init__()
        self.encode_basis: Tensor
        self.decode_basis: Tensor
        self.register_buffer("encode_basis", basis, persistent=False)
        self.register_buffer("decode_basis", basis.T.contiguous(), persistent=False)
        # Owned, and named, by the stage.
        self._learned: tuple[nn.Parameter | None, nn.Parameter | None] = (encoder, decoder)

    def encode(self, x_btd: Tensor, anchor_btd: Tensor | None, rank: int) -> Tensor:
        basis = self._learned[0] if self._learned[0] is not None else self.encode_basis
        rest = x_btd if anchor_btd is None else x_btd - anchor_btd
        return rest @ basis[:, :rank].to(rest.dtype)

    def decode(self, c_btr: Tensor, anchor_btd: Tensor | None) -> Tensor:
        basis = self._learned[1] if self._learned[1] is not None else self.decode_basis
        rank = c_btr.shape[-1]
        if rank == 0:
            if anchor_btd is None:
                return c_btr.new_zeros(*c_btr.shape[:-1], basis.shape[1])
            return anchor_btd
        x = c_btr @ basis[:rank].to(c_btr.dtype)
        return x if anchor_btd is None else anchor_btd + x


def lookup(table: Tensor, tokens_bt: Tensor) -> Tensor:
    """Rows of ``table`` (vocab, d) for integer ``tokens_bt``."""
    return F.embedding(tokens_bt, table)


__all__ = ["Boundary", "DenseBoundary", "ProjectedBoundary", "lookup"]
