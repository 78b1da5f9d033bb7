"""Coefficients as bytes: sizes, error bounds, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarm.config.spec import WireDtype
from swarm.core.frame import FrameHeader, FrameKind, payload_bytes
from swarm.errors import FrameError
from swarm.model.codec import check_finite, decode, encode, round_trip, wire_round_trip

BATCH, TIME = 2, 5
DTYPES = list(WireDtype)
RANKS = [0, 1, 3, 7, 8]
# Half a level of absmax / 7 or / 127, and the share that rounding the scale to bf16 (8 bits) can add.
ABSMAX_ERROR = {WireDtype.INT8: 0.5 / 127 + 2**-8, WireDtype.INT4: 0.5 / 7 + 2**-8}


def coefficients(rank: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(BATCH, TIME, rank, generator=torch.Generator().manual_seed(rank)) * scale


def header(rank: int, dtype: WireDtype, kind: FrameKind = FrameKind.GRADIENT) -> FrameHeader:
    return FrameHeader("run", 1, 1, 0, kind, 0, 1, rank, dtype, BATCH, TIME, ())


def over_the_wire(c: torch.Tensor, dtype: WireDtype) -> torch.Tensor:
    payload = bytes(encode(c, dtype, None, 256))
    out, tokens = decode(
        payload, batch=BATCH, time=TIME, rank=c.shape[-1], dtype=dtype, vocab_size=256, has_tokens=False
    )
    assert tokens is None
    return out


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_has_the_size_its_header_announces(dtype, rank):
    tokens = np.zeros((BATCH, TIME + 1), dtype=np.int64)
    activation = header(rank, dtype, FrameKind.ACTIVATION)
    assert len(encode(coefficients(rank), dtype, None, 300)) == payload_bytes(header(rank, dtype), 300)
    assert len(encode(coefficients(rank), dtype, tokens, 300)) == payload_bytes(activation, 300)


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_round_trip_is_within_the_precision_of_the_dtype(dtype, rank):
    c = coefficients(rank)
    out = over_the_wire(c, dtype)
    assert (out.shape, out.dtype) == (c.shape, torch.float32)
    if dtype is WireDtype.FP32:
        assert torch.equal(out, c)
    elif dtype is WireDtype.BF16:
        assert torch.equal(out, c.bfloat16().float())
    elif rank:
        absmax = c.abs().amax(-1, keepdim=True)
        assert bool(((out - c).abs() <= ABSMAX_ERROR[dtype] * absmax).all())


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_rounds_exactly_as_the_bytes_do(dtype, rank):
    c = coefficients(rank)
    assert torch.equal(round_trip(c, dtype), over_the_wire(c, dtype))


def test_int4_packs_two_values_in_a_byte_low_nibble_first():
    c = torch.tensor([[[7.0, -7.0, 1.0]]])
    payload = bytes(encode(c, WireDtype.INT4, None, 256))
    assert payload == bytes([0x97, 0x01]) + torch.tensor([1.0]).bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_stay_zero_and_do_not_spoil_their_neighbours(dtype):
    c = coefficients(3)
    c[0, 2] = 0
    out = over_the_wire(c, dtype)
    assert torch.equal(out[0, 2], torch.zeros(3))
    assert bool(torch.isfinite(out).all())
    assert float(out[0, 1].abs().max()) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_of_a_mean_loss_do_not_underflow(dtype):
    c = coefficients(8, 1e-7)
    out = over_the_wire(c, dtype)
    cosine = torch.nn.functional.cosine_similarity(out.flatten(), c.flatten(), dim=0)
    assert float(cosine) > 0.99


@pytest.mark.parametrize("scale", [1e-30, 1e30])
@pytest.mark.parametrize("dtype", [WireDtype.INT8, WireDtype.INT4])
def test_scales_have_the_range_of_fp32(dtype, scale):
    c = coefficients(8, scale)
    assert float((over_the_wire(c, dtype) - c).abs().max()) <= 0.08 * float(c.abs().max())


@pytest.mark.parametrize(("vocab_size", "width"), [(256, 1), (257, 2), (65536, 2), (65537, 4)])
@pytest.mark.parametrize(("dtype", "rank"), [(WireDtype.FP32, 0), (WireDtype.BF16, 3), (WireDtype.INT4, 3)])
def test_token_ids_cross_as_the_smallest_unsigned_integers(vocab_size, width, dtype, rank):
    tokens = np.linspace(0, vocab_size - 1, BATCH * (TIME + 1)).astype(np.int64).reshape(BATCH, TIME + 1)
    c = coefficients(rank)
    payload = bytes(encode(c, dtype, tokens, vocab_size))
    assert len(payload) - len(encode(c, dtype, None, vocab_size)) == width * tokens.size
    _, ids = decode(payload, batch=BATCH, time=TIME, rank=rank, dtype=dtype, vocab_size=vocab_size, has_tokens=True)
    assert ids is not None
    assert ids.dtype == torch.int64
    assert ids.tolist() == tokens.tolist()


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_payload_of_another_size_is_refused(dtype, change):
    payload = bytes(encode(coefficients(3), dtype, None, 256))
    payload = payload[:change] if change < 0 else payload + b"\0"
    with pytest.raises(FrameError, match=f"A payload has {len(payload)} bytes, and its header says"):
        decode(payload, batch=BATCH, time=TIME, rank=3, dtype=dtype, vocab_size=256, has_tokens=False)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_with_a_value_that_is_not_finite_is_refused(dtype, bad):
    c = coefficients(3)
    check_finite(encode(c, dtype, None, 256), header(3, dtype))
    c[1, 4, 2] = bad
    with pytest.raises(FrameError, match=r"Refused a frame: 1 of its (30|10) values are NaN or infinite"):
        check_finite(encode(c, dtype, None, 256), header(3, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frame_of_rank_zero_has_nothing_to_check(dtype):
    check_finite(b"", header(0, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_passes_the_rounding_straight_and_is_rounded_itself(dtype):
    c = coefficients(3).requires_grad_()
    gradient = coefficients(3, 1e-3).flip(0)
    wire_round_trip(c, dtype).backward(gradient)
    assert c.grad is not None
    assert torch.equal(c.grad, over_the_wire(gradient, dtype))
