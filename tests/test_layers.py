"""Imports point downwards: no layer knows what is above it, and the core does no I/O."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LAYERS = (
    "peers",
    "swarm.runtime",
    "swarm.sim",
    "swarm.observe",
    "swarm.net",
    "swarm.discovery",
    "swarm.collective",
    "swarm.state",
    "swarm.model",
    "swarm.data",
    "swarm.core",
    "swarm.config",
    "swarm.errors",
)
"""From top to bottom."""

SHELLS = {"swarm.runtime", "swarm.sim"}
"""Two shells around the same core; neither knows the other."""

NOT_IN_CORE = {"asyncio", "torch", "grpc", "hivemind", "socket", "time", "threading", "numpy"}


def modules(root: Path) -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    found: dict[str, Path] = {}
    for folder in ("swarm", "peers"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    """What ``name`` imports anywhere, functions and type checking included, as modules where they are ``known``."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module.split(".") if node.module else [])])
            submodules = [f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in known]
            yield from submodules
            if len(submodules) < len(node.names):
                yield base


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module to what it imports. A package's ``__init__`` and its own submodules are different modules."""
    known = modules(root)
    return {name: set(imports(name, path, known)) - {name} for name, path in known.items()}


def layer_of(module: str) -> str | None:
    return next((layer for layer in LAYERS if module == layer or module.startswith(f"{layer}.")), None)


def upward_imports(root: Path) -> list[str]:
    faults: list[str] = []
    for module, targets in import_graph(root).items():
        layer = layer_of(module)
        if layer is None:
            if module != "swarm":
                faults.append(f"{module} is in no layer")
            continue
        for target in sorted(targets):
            other = layer_of(target)
            if other is None or other == layer:
                continue
            if LAYERS.index(other) < LAYERS.index(layer) or {layer, other} == SHELLS:
                faults.append(f"{module} imports {target}")
    return faults


def circles(root: Path) -> list[str]:
    """Each circle once, as ``a -> b -> a``."""
    graph = import_graph(root)
    done: set[str] = set()
    found: list[str] = []

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
            return
        if module in done or module not in graph:
            return
        for target in sorted(graph[module]):
            visit(target, [*path, module])
        done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def core_impurities(root: Path) -> list[str]:
    return [
        f"{module} imports {target}"
        for module, targets in import_graph(root).items()
        if layer_of(module) == "swarm.core"
        for target in sorted(targets)
        if target.split(".")[0] in NOT_IN_CORE
    ]


def tree(root: Path, sources: dict[str, str]) -> Path:
    """A made-up product of ``sources``, by their paths below swarm/."""
    for name, source in sources.items():
        path = root / "swarm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_nothing_imports_upwards() -> None:
    assert upward_imports(ROOT) == []


def test_nothing_imports_in_a_circle() -> None:
    assert circles(ROOT) == []


def test_the_core_does_no_io() -> None:
    assert core_impurities(ROOT) == []


def test_all_modules_are_seen() -> None:
    graph = import_graph(ROOT)
    assert "swarm.core.frame" in graph["swarm.runtime.stage"]
    assert "swarm.runtime.peer" in graph["peers.swarm_peer"], "imports inside functions count"
    for layer in ("peers", "swarm.runtime", "swarm.net", "swarm.core", "swarm.config", "swarm.errors"):
        assert any(layer_of(module) == layer for module in graph), layer


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("core/view", "from swarm.model.stage import Stage", "swarm.core.view imports swarm.model.stage"),
        ("net/link", "import swarm.observe", "swarm.net.link imports swarm.observe"),
        ("net/link", "def f():\n    from swarm.runtime import peer", "swarm.net.link imports swarm.runtime"),
        ("data/text", "from ..model.stage import Stage", "swarm.data.text imports swarm.model.stage"),
        ("errors", "from swarm.config import spec", "swarm.errors imports swarm.config"),
        ("sim/clock", "import swarm.runtime.peer", "swarm.sim.clock imports swarm.runtime.peer"),
        ("runtime/peer", "import swarm.sim.clock", "swarm.runtime.peer imports swarm.sim.clock"),
        ("state/disk", "import peers.demo", "swarm.state.disk imports peers.demo"),
        ("extra/thing", "", "swarm.extra.thing is in no layer"),
    ],
)
def test_an_import_upwards_is_found(module: str, source: str, fault: str, tmp_path: Path) -> None:
    assert upward_imports(tree(tmp_path, {module: source})) == [fault]


def test_an_import_downwards_is_fine(tmp_path: Path) -> None:
    root = tree(
        tmp_path, {"runtime/peer": "from swarm.core import view\nimport swarm.errors", "core/view": "", "errors": ""}
    )
    assert upward_imports(root) == []
    assert circles(root) == []


def test_a_circle_within_a_package_is_found(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "net/link": "from swarm.net import frames",
            "net/frames": "from swarm.net.meter import Meter",
            "net/meter": "def f():\n    from .link import Link",
        },
    )
    assert circles(root) == ["swarm.net.frames -> swarm.net.meter -> swarm.net.link -> swarm.net.frames"]


def test_a_circle_through_a_package_is_found(tmp_path: Path) -> None:
    root = tree(tmp_path, {"net/__init__": "from swarm.net.link import Link", "net/link": "from swarm.net import Link"})
    assert circles(root) == ["swarm.net -> swarm.net.link -> swarm.net"]


@pytest.mark.parametrize("library", sorted(NOT_IN_CORE))
def test_io_in_the_core_is_found(library: str, tmp_path: Path) -> None:
    root = tree(tmp_path, {"core/view": f"def f():\n    import {library}", "net/link": f"import {library}"})
    assert core_impurities(root) == [f"swarm.core.view imports {library}"]


def test_a_part_of_a_forbidden_library_is_found(tmp_path: Path) -> None:
    assert core_impurities(tree(tmp_path, {"core/view": "from torch.nn import Module"})) != []
