"""Small corpora for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

from swarm.config.spec import DataSpec, ModelSpec

TINY = ModelSpec(vocab_size=256, d_model=8, layers=1, heads=1, kv_heads=1, context=4, stages=1)


def text_folder(folder: Path, documents: list[str]) -> DataSpec:
    """Each document in a text file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents):
        (folder / f"{number:05d}.txt").write_text(text)
    return DataSpec(source=str(folder))


def jsonl(path: Path, entries: list[object], field: str = "text") -> DataSpec:
    """One entry a line."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return DataSpec(source=str(path), field=field)
