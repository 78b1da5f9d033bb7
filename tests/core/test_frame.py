"""What a frame weighs, and which frames are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.config.spec import WireDtype
from swarm.core.frame import (
    FrameGuard,
    FrameHeader,
    FrameKind,
    boundary_bytes_per_token,
    dense_bytes_per_token,
    payload_bytes,
    token_width,
)
from swarm.errors import FrameError
from tests.core.loopback import small_spec

SPEC = small_spec()
GUARD = FrameGuard(SPEC, SPEC.run_id, stage=1)
HEADER = FrameHeader(
    run_id=SPEC.run_id,
    view=5,
    step=1,
    microbatch=0,
    kind=FrameKind.ACTIVATION,
    source_stage=0,
    target_stage=1,
    rank=4,
    dtype=WireDtype.BF16,
    batch=2,
    time=8,
    route=("a", "b", "c"),
)


def check(header: FrameHeader, *, view: int = 5, sender_stage: int = 0, extra: int = 0) -> None:
    size = payload_bytes(header, SPEC.model.vocab_size) + extra
    GUARD.check(header, view=view, sender_stage=sender_stage, payload_size=size)


def test_a_frame_that_fits_passes() -> None:
    check(HEADER)
    check(replace(HEADER, kind=FrameKind.GRADIENT, source_stage=2, route=()), sender_stage=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run_id": "other"}, "run id is 'other'"),
        ({"view": 4}, "view 4 is older than 5"),
        ({"step": 0}, "step is 0"),
        ({"microbatch": 3}, "microbatch 3 is not in 0..2"),
        ({"source_stage": 2}, "source stage is 2"),
        ({"target_stage": 2}, "target stage is 2"),
        ({"rank": 5}, "rank and dtype, 5 bf16, are not on the run's ladder (4 bf16)"),
        ({"dtype": WireDtype.FP32}, "rank and dtype, 4 fp32, are not on"),
        ({"batch": 3}, "shape is (3, 8)"),
        ({"time": 9}, "shape is (2, 9)"),
        ({"route": ("a",)}, "number of peers in the route is 1"),
    ],
)
def test_a_frame_with_one_wrong_field_is_refused_with_its_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(FrameError, match="Refused a frame") as caught:
        check(replace(HEADER, **change))  # type: ignore[arg-type]
    assert words in caught.value.what


def test_a_payload_of_another_size_is_refused() -> None:
    with pytest.raises(FrameError, match="payload size in bytes"):
        check(HEADER, extra=1)


def test_a_stage_cannot_speak_for_another() -> None:
    with pytest.raises(FrameError, match="source stage"):
        check(HEADER, sender_stage=2)


def test_token_ids_take_the_smallest_unsigned_integer() -> None:
    assert [token_width(size) for size in (256, 257, 65_536, 65_537)] == [1, 2, 2, 4]


def test_a_payload_weighs_its_coefficients_and_token_ids() -> None:
    assert payload_bytes(HEADER, 256) == 2 * 8 * 4 * 2 + 2 * 9
    assert payload_bytes(replace(HEADER, kind=FrameKind.GRADIENT), 256) == 2 * 8 * 4 * 2


def test_sixteen_times_fewer_coefficients_are_fifteen_times_fewer_bytes() -> None:
    spec = small_spec(
        model={"d_model": 128, "layers": 6, "heads": 4, "kv_heads": 2, "context": 128, "stages": 3},
        boundary={"rank": 8},
    )
    wire = boundary_bytes_per_token(spec, 8, WireDtype.BF16)
    assert wire == pytest.approx(2 * 16 + 129 / 128)
    assert dense_bytes_per_token(spec) / wire == pytest.approx(15.5, abs=0.1)
