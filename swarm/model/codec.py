"""Coefficients as bytes, in the layout of :class:`swarm.core.frame.FrameHeader`, and back.

int8 and int4 are symmetric with one scale per token, absmax / 127 or / 7, rounded to bf16 before it is used, so that
both ends compute with the same scale.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from swarm.config.spec import WireDtype
from swarm.core.frame import FrameHeader, coefficient_bytes, token_width
from swarm.errors import FrameError

# Frames are read-only views of what the network handed over; nothing here writes to them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_LEVELS = {WireDtype.INT8: 127, WireDtype.INT4: 7}
_FLOATS = {WireDtype.FP32: torch.float32, WireDtype.BF16: torch.bfloat16}
_UNSIGNED = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}


def encode(c_btr: Tensor, dtype: WireDtype, tokens: np.ndarray | None, vocab_size: int) -> memoryview:
    """The payload of a frame.

    Args:
        c_btr: coefficients, any float dtype and device.
        tokens: (batch, time + 1) integers, or None for a gradient.

    Returns:
        One contiguous buffer; conversion writes straight into it.
    """
    batch, time, rank = c_btr.shape
    size = coefficient_bytes(batch * time, rank, dtype)
    width = token_width(vocab_size)
    payload = bytearray(size + (tokens.size * width if tokens is not None else 0))
    c = c_btr.detach()
    if rank:
        target = torch.frombuffer(payload, dtype=torch.uint8, count=size)
        if dtype in _FLOATS:
            target.view(_FLOATS[dtype]).copy_(c.reshape(-1))
        else:
            q, scale = quantise(c, dtype)
            q, scale = q.cpu().reshape(-1), scale.cpu().reshape(-1)
            if dtype is WireDtype.INT4:
                q = _pack(q)
            values = q.view(torch.uint8)
            target[: values.numel()].copy_(values)
            target[values.numel() :].copy_(scale.view(torch.uint8))
    if tokens is not None:
        np.frombuffer(payload, dtype=_UNSIGNED[width], offset=size)[:] = tokens.reshape(-1)
    return memoryview(payload)


def decode(
    payload: memoryview | bytes | bytearray,
    *,
    batch: int,
    time: int,
    rank: int,
    dtype: WireDtype,
    vocab_size: int,
    has_tokens: bool,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor | None]:
    """The inverse of :func:`encode`: coefficients (batch, time, rank) in fp32, and token ids as int64.

    Raises:
        FrameError: the size of the payload is not what the arguments say.
    """
    size = coefficient_bytes(batch * time, rank, dtype)
    width = token_width(vocab_size)
    expected = size + (batch * (time + 1) * width if has_tokens else 0)
    if len(payload) != expected:
        raise FrameError(f"A payload has {len(payload)} bytes, and its header says {expected}.")
    count = batch * time * rank
    if rank == 0:
        c = torch.zeros(batch, time, 0, device=device)
    elif dtype in _FLOATS:
        c = torch.frombuffer(payload, dtype=_FLOATS[dtype], count=count).to(device=device, dtype=torch.float32)
        c = c.view(batch, time, rank)
    else:
        q, scale = _split(payload, batch * time, rank, dtype)
        c = (q.to(device).float().view(batch * time, rank) * scale.to(device).float()[:, None]).view(batch, time, rank)
    if not has_tokens:
        return c, None
    ids = np.frombuffer(payload, dtype=_UNSIGNED[width], count=batch * (time + 1), offset=size)
    return c, torch.from_numpy(ids.astype(np.int64)).view(batch, time + 1).to(device)


def check_finite(payload: memoryview | bytes | bytearray, header: FrameHeader) -> None:
    """Refuse NaN and infinity without decoding.

    Raises:
        FrameError: names how many there are.
    """
    if header.rank == 0:
        return
    tokens = header.batch * header.time
    if header.dtype in _FLOATS:
        values = torch.frombuffer(payload, dtype=_FLOATS[header.dtype], count=tokens * header.rank)
    else:
        _, values = _split(payload, tokens, header.rank, header.dtype)
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        raise FrameError(
            f"Refused a frame: {int((~finite).sum())} of its {values.numel()} values are NaN or infinite.",
            meaning="Nothing of it was used, and its sender is charged with it.",
            remedy="The sender has diverged or its device is faulty: look at its loss and its log.",
        )


def quantise(c_btr: Tensor, dtype: WireDtype) -> tuple[Tensor, Tensor]:
    """int8 values of the shape of ``c_btr`` and bf16 scales (batch, time)."""
    levels = _LEVELS[dtype]
    c = c_btr.float()
    scale = (c.abs().amax(dim=-1) / levels).to(torch.bfloat16)
    wide = scale.float()[..., None]
    q = torch.where(wide > 0, c / wide, torch.zeros_like(c)).round_().clamp_(-levels, levels)
    return q.to(torch.int8), scale


def round_trip(c_btr: Tensor, dtype: WireDtype) -> Tensor:
    """What the receiver gets of ``c_btr``: :func:`encode` and :func:`decode` without the bytes."""
    if c_btr.shape[-1] == 0 or dtype is WireDtype.FP32:
        return c_btr.float()
    if dtype is WireDtype.BF16:
        return c_btr.to(torch.bfloat16).float()
    q, scale = quantise(c_btr, dtype)
    return q.float() * scale.float()[..., None]


class _Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, c_btr: Tensor, dtype: WireDtype) -> Tensor:
        ctx.dtype = dtype
        return round_trip(c_btr, dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return round_trip(gradient, ctx.dtype), None


def wire_round_trip(c_btr: Tensor, dtype: WireDtype) -> Tensor:
    """A boundary inside one process: rounds the coefficients on the way forward and their gradient on the way back.

    Straight-through: the sender's gradient is that of the unrounded coefficients.
    """
    return _Wire.apply(c_btr, dtype)  # type: ignore[no-any-return]


def _pack(q: Tensor) -> Tensor:
    """Two int4 values in a byte, the first in the low nibble; an odd count is padded with 0."""
    if q.numel() % 2:
        q = torch.cat((q, q.new_zeros(1)))
    pairs = q.view(-1, 2)
    return ((pairs[:, 0] & 0xF) | (pairs[:, 1] << 4)).to(torch.int8)


def _split(payload: memoryview | bytes | bytearray, tokens: int, rank: int, dtype: WireDtype) -> tuple[Tensor, Tensor]:
    count = tokens * rank
    if dtype is WireDtype.INT8:
        q, offset = torch.frombuffer(payload, dtype=torch.int8, count=count), count
    else:
        offset = (count + 1) // 2
        packed = torch.frombuffer(payload, dtype=torch.int8, count=offset)
        # Shifting left and arithmetically right again extends the sign of the low nibble.
        q = torch.stack(((packed << 4) >> 4, packed >> 4), dim=-1).reshape(-1)[:count]
    scales = torch.frombuffer(payload, dtype=torch.uint8, count=2 * tokens, offset=offset)
    return q, scales.clone().view(torch.bfloat16)
