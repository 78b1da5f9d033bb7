"""A run spec is refused with the key's name and the reason, and its hash is the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pydantic
import pytest

from swarm.config.spec import BoundaryKind, ModelSpec, RunSpec, WireDtype, presets
from swarm.errors import SpecError

DEFAULT_RUN_ID = "65af1a9f2c29abd77ecf540e99935ee1"
"""Changes only when a field is added, removed or gets another default: then runs of both versions must not mix."""

REFUSED = [
    ({"layers": 3}, "layers: unknown key"),
    ({"model": {"layer": 3}}, "model.layer: unknown key"),
    ({"boundary": {"ranks": [8]}}, "boundary.ranks: unknown key"),
    ({"model": {"d_model": 130, "heads": 4}}, "model: d_model 130 is not divisible by heads 4"),
    ({"model": {"d_model": 12, "heads": 4, "kv_heads": 2}}, "model: d_model/heads is 3"),
    ({"model": {"heads": 4, "kv_heads": 3}}, "model: heads 4 is not divisible by kv_heads 3"),
    ({"model": {"layers": 2, "stages": 3}}, "model: layers 2 are fewer than stages 3"),
    ({"model": {"tied_head": True, "stages": 3}}, "model: tied_head needs embedding and head on one stage"),
    ({"model": {"d_model": 0}}, "model.d_model: Input should be greater than or equal to 1"),
    ({"model": {"stages": 0}}, "model.stages: Input should be greater than or equal to 1"),
    ({"model": {"context": -1}}, "model.context: Input should be greater than or equal to 1"),
    ({"model": {"vocab_size": 1}}, "model.vocab_size: Input should be greater than or equal to 2"),
    ({"model": {"vocab_size": 255}}, "model.vocab_size 255 is below the 256 of data.tokenizer 'bytes'"),
    ({"model": {"layers": 1.5}}, "model.layers: Input should be a valid integer"),
    ({"model": {"rope_theta": 0}}, "model.rope_theta: Input should be greater than 0"),
    ({"model": {"norm_eps": float("nan")}}, "model.norm_eps: Input should be"),
    ({"batch": {"sequences": 10, "microbatches": 4}}, "batch: sequences 10 is not divisible by microbatches 4"),
    ({"batch": {"sequences": 4, "microbatches": 8}}, "batch: sequences 4 is not divisible by microbatches 8"),
    ({"batch": {"microbatches": 0}}, "batch.microbatches: Input should be greater than or equal to 1"),
    ({"boundary": {"kind": "sparse"}}, "boundary.kind: Input should be 'dense', 'subspace' or 'anchored'"),
    ({"boundary": {"dtype": "fp8"}}, "boundary.dtype: Input should be 'fp32', 'bf16', 'int8' or 'int4'"),
    ({"boundary": {"rank": -1}}, "boundary.rank: Input should be greater than or equal to 0"),
    ({"boundary": {"rank": 129}}, "boundary.rank 129 is above model.d_model 128"),
    ({"boundary": {"ladder": [16, 8]}}, "boundary: ladder ['16 bf16', '8 bf16'] has a rank above rank 8"),
    ({"boundary": {"ladder": [8, 8]}}, "boundary: ladder ['8 bf16', '8 bf16'] is not strictly falling in bytes"),
    ({"boundary": {"ladder": [8, "4 fp32"]}}, "boundary: ladder ['8 bf16', '4 fp32'] is not strictly falling in bytes"),
    ({"boundary": {"ladder": [4, 2]}}, "boundary: ladder ['4 bf16', '2 bf16'] does not begin with rank 8 in bf16"),
    ({"boundary": {"ladder": ["8 int8"]}}, "boundary: ladder ['8 int8'] does not begin with rank 8 in bf16"),
    ({"boundary": {"ladder": ["8 fp8"]}}, "boundary.ladder.0: String should match pattern"),
    ({"boundary": {"ladder": [8, True]}}, "boundary.ladder.1: Input should be a valid string"),
    ({"boundary": {"kind": "dense", "ladder": [8, 4]}}, "boundary: ladder needs a compressed kind"),
    ({"boundary": {"kind": "subspace", "learned_basis": True}}, "boundary: learned_basis needs kind = 'anchored'"),
    ({"optimizer": {"lr": 0}}, "optimizer.lr: Input should be greater than 0"),
    ({"optimizer": {"lr": float("inf")}}, "optimizer.lr: Input should be a finite number"),
    ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2: Input should be less than 1"),
    ({"optimizer": {"min_lr_share": 1.1}}, "optimizer.min_lr_share: Input should be less than or equal to 1"),
    ({"optimizer": {"clip_norm": 0}}, "optimizer.clip_norm: Input should be greater than 0"),
    ({"data": {"format": "csv"}}, "data.format: String should match pattern"),
    ({"data": {"tokenizer_sha256": "abc"}}, "data.tokenizer_sha256: String should match pattern"),
    ({"data": {"validation_share": 0.5}}, "data.validation_share: Input should be less than 0.5"),
    ({"evaluation": {"sequences": 6}}, "evaluation.sequences 6 is not divisible by the microbatch size 4"),
    ({"evaluation": {"every": -1}}, "evaluation.every: Input should be greater than or equal to 0"),
    ({"checkpoint": {"every": 0}}, "checkpoint.every: Input should be greater than or equal to 1"),
    ({"checkpoint": {"keep": 1}}, "checkpoint.keep: Input should be greater than or equal to 2"),
    ({"name": "My run"}, "name: String should match pattern"),
    ({"name": "../run"}, "name: String should match pattern"),
    ({"seed": -1}, "seed: Input should be greater than or equal to 0"),
    ({"seed": 2**31}, "seed: Input should be less than 2147483648"),
    ({"steps": 0}, "steps: Input should be greater than or equal to 1"),
    ({"steps": "many"}, "steps: Input should be a valid integer"),
    ({"model": 3}, "model: Input should be"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=[reason[:60] for _, reason in REFUSED])
def test_it_is_refused_with_the_key_and_the_reason(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.parse(fields, origin="run.toml")
    assert caught.value.what.startswith("run.toml: ")
    assert reason in caught.value.what
    assert caught.value.exit_code == 2
    assert caught.value.meaning
    assert caught.value.remedy


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.parse({"steps": 0, "model": {"heads": 0}, "sede": 1})
    for key in ("steps:", "model.heads:", "sede: unknown key"):
        assert key in caught.value.what


@pytest.mark.parametrize(
    "fields",
    [
        {"boundary": {"rank": 0}},
        {"boundary": {"rank": 128}},
        {"boundary": {"kind": "dense", "rank": 4096}},
        {"boundary": {"rank": 16, "ladder": [16, 8, 0]}},
        {"model": {"stages": 1, "tied_head": True}},
        {"model": {"stages": 6}},
        {"model": {"vocab_size": 100}, "data": {"tokenizer": "tokenizer.json"}},
        {"evaluation": {"every": 0}},
    ],
)
def test_the_edges_of_what_is_possible_are_accepted(fields: dict[str, Any]) -> None:
    assert RunSpec.parse(fields).run_id


def test_the_run_id_is_a_hash_that_stays() -> None:
    assert RunSpec().run_id == DEFAULT_RUN_ID


def test_every_field_is_part_of_the_run_id() -> None:
    base = RunSpec().model_dump(mode="json")
    others: dict[str, Any] = {
        "name": "other",
        "boundary.kind": "subspace",
        "boundary.ladder": [8, "8 int8", 4],
        "boundary.dtype": "int8",
        "boundary.headroom": 0.5,
        "data.source": "text/",
        "data.format": "jsonl",
        "data.field": "body",
        "data.tokenizer": "tokenizer.json",
        "data.tokenizer_sha256": "0" * 64,
        "batch.sequences": 32,
        "batch.microbatches": 8,
        "model.d_model": 256,
        "model.heads": 8,
        "model.vocab_size": 512,
        "model.kv_heads": 4,
        "model.ffn_dim": 512,
        "evaluation.sequences": 128,
        "model.tied_head": {"tied_head": True, "stages": 1},
    }
    ids = {RunSpec().run_id}
    count = 1
    for section, value in base.items():
        for key, old in value.items() if isinstance(value, dict) else [(None, value)]:
            name = section if key is None else f"{section}.{key}"
            new = others.get(
                name, (not old) if isinstance(old, bool) else old * 0.5 if isinstance(old, float) else None
            )
            new = old + 1 if new is None else new
            change = (
                {section: new} if key is None else {section: value | (new if isinstance(new, dict) else {key: new})}
            )
            ids.add(RunSpec.parse(base | change).run_id)
            count += 1
    assert len(ids) == count


def test_writing_defaults_out_is_the_same_run() -> None:
    assert RunSpec.parse(RunSpec().model_dump(mode="json")).run_id == RunSpec().run_id
    assert RunSpec.parse({"steps": 400, "model": {}}).run_id == RunSpec().run_id


def test_canonical_json_comes_back_as_the_same_spec() -> None:
    spec = RunSpec.parse({"seed": 7, "boundary": {"rank": 16, "ladder": [16, 4], "dtype": "int4"}})
    text = spec.canonical_json()
    assert RunSpec.from_json(text) == spec
    assert RunSpec.from_json(text).canonical_json() == text
    assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text


def test_it_cannot_be_changed() -> None:
    spec = RunSpec()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        spec.steps = 1  # type: ignore[misc]
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        spec.model.layers = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("layers", "stages", "cut"),
    [(6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_layers_are_cut_into_stages_without_gap(layers: int, stages: int, cut: list[int]) -> None:
    model = ModelSpec(layers=layers, stages=stages)
    ranges = [model.stage_layers(stage) for stage in range(stages)]
    assert [len(part) for part in ranges] == cut
    assert [layer for part in ranges for layer in part] == list(range(layers))


def test_the_width_of_the_feed_forward_layer() -> None:
    assert ModelSpec(d_model=128).ffn == 352
    assert ModelSpec(d_model=128, ffn_dim=500).ffn == 500


def test_dense_messages_have_full_rank() -> None:
    assert RunSpec.parse({"boundary": {"kind": "dense"}}).wire_rank == 128
    assert RunSpec.parse({"boundary": {"rank": 4}}).wire_rank == 4


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "mine"\n[boundary]\nkind = "subspace"\ndtype = "int8"\nrank = 4\n')
    spec = RunSpec.load(tmp_path / "run.toml")
    assert (spec.name, spec.boundary.kind, spec.boundary.dtype) == ("mine", BoundaryKind.SUBSPACE, WireDtype.INT8)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "Cannot read the run spec"),
        (b"steps = ", "is not TOML"),
        (b"steps = 1\nsteps = 2", "is not TOML"),
        (b"\xff\xfe", "Cannot read the run spec"),
        (b"step = 1", "step: unknown key"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SpecError) as caught:
        RunSpec.load(path)
    assert words in caught.value.what
    assert "run.toml" in caught.value.what


def test_an_unknown_preset_is_answered_with_the_known_ones() -> None:
    with pytest.raises(SpecError) as caught:
        RunSpec.load("no-such-preset")
    assert "demo" in caught.value.remedy


@pytest.mark.parametrize("name", presets())
def test_presets_load(name: str) -> None:
    assert RunSpec.load(name).name == name


def test_the_demo_has_three_stages_and_four_microbatches() -> None:
    demo = RunSpec.load("demo")
    assert (demo.model.stages, demo.model.layers, demo.model.context) == (3, 6, 128)
    assert (demo.batch.sequences, demo.batch.microbatches) == (16, 4)
