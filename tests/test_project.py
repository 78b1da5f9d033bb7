"""What the documents say exists, and what exists is in the documents."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import click
import pytest

from peers import swarm_bootstrap, swarm_peer
from swarm.config.spec import RunSpec, presets
from swarm.net.messages import message_class

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text()
DOCUMENTS = [
    ROOT / name
    for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "deploy/README.md")
    if (ROOT / name).exists()
]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def options(command: click.Command) -> set[str]:
    return {name for param in command.params for name in param.opts} | {"--help", "-h"}


def commands() -> dict[str, click.Command]:
    """Every command by what is typed."""
    assert isinstance(swarm_peer.main, click.Group)
    found = {f"swarm-peer {name}": command for name, command in swarm_peer.main.commands.items()}
    return found | {"swarm-bootstrap": swarm_bootstrap.main}


def invocations(text: str) -> list[tuple[str, list[str]]]:
    """Commands with the options that follow them on the same line, in code."""
    code = re.findall(r"```.*?\n(.*?)```|`([^`\n]+)`", text, re.DOTALL)
    found: list[tuple[str, list[str]]] = []
    for line in (line for block in code for part in block for line in part.splitlines()):
        match = re.search(r"(?:^|[\s/])(swarm-bootstrap|swarm-peer [a-z]+)(?=\s|$)(.*)", line)
        if match:
            found.append((match[1], re.findall(r"(?<!\S)(--?[a-z][a-z-]*)", match[2])))
    return found


def sections(text: str) -> dict[str, str]:
    """The options tables of the README by command."""
    parts = re.split(r"^`(swarm-bootstrap|swarm-peer join INVITATION)`$", text, flags=re.MULTILINE)[1:]
    return {
        name.removesuffix(" INVITATION"): body.split("\n\n`")[0]
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


def test_architecture_names_every_folder() -> None:
    folders = {f"swarm/{path.parent.name}" for path in (ROOT / "swarm").glob("*/*.py")}
    assert len(folders) >= 8
    assert {folder for folder in folders if f"{folder}/ " not in ARCHITECTURE} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_documents_name_nothing_that_does_not_exist(document: Path) -> None:
    text = document.read_text()
    named = set(
        re.findall(r"(?<![\w/.-])(?:swarm|tests|proto|peers|deploy)/[a-z0-9_/]*(?:\.(?:py|toml|txt|yaml))?", text)
    )
    named |= {f"swarm/{name}" for name in re.findall(r"`((?:core|net|model)/[a-z_]+\.py)`", text)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_headings_that_the_readme_links_to_exist() -> None:
    headings = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    }
    assert [link for link in re.findall(r"\]\(#([^)]+)\)", README) if link not in headings] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_make_targets_in_documents_exist(document: Path) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)", document.read_text(), re.MULTILINE))
    assert named - make_targets() == set()


def test_the_readme_names_the_targets_of_the_makefile() -> None:
    assert {target for target in make_targets() if f"make {target}" not in README} == set()


@pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])
def test_commands_in_documents_exist(document: Path) -> None:
    known = commands()
    for command, used in invocations(document.read_text()):
        assert command in known, command
        assert set(used) - options(known[command]) == set(), command


def test_commands_are_found_in_text() -> None:
    assert invocations("`swarm-peer join --stage 1 X`\n```\n$ swarm-bootstrap --bad\n```\nswarm-peer prose") == [
        ("swarm-peer join", ["--stage"]),
        ("swarm-bootstrap", ["--bad"]),
    ]


@pytest.mark.parametrize("command", ["swarm-bootstrap", "swarm-peer join"])
def test_the_readme_lists_every_option(command: str) -> None:
    listed = set(re.findall(r"^\| `(--[a-z-]+)", sections(README)[command], re.MULTILINE))
    assert listed == options(commands()[command]) - {"--help", "-h", "invitation"}


@pytest.mark.parametrize("command", sorted(commands()))
def test_the_readme_names_every_option(command: str) -> None:
    named = set(re.findall(r"`(--[a-z-]+)", README))
    assert {name for name in options(commands()[command]) if name.startswith("--")} - named == {"--help"}


def test_the_run_spec_in_the_readme_is_the_default() -> None:
    text = re.search(r"```toml\n(.*?)```", README, re.DOTALL)
    assert text is not None
    fields = tomllib.loads(text[1])
    assert RunSpec.parse(fields | {"name": "run"}) == RunSpec()
    defaults = RunSpec().model_dump(mode="json")
    assert {key: sorted(value) for key, value in fields.items() if isinstance(value, dict)} == {
        key: sorted(value) for key, value in defaults.items() if isinstance(value, dict)
    }, "every key is shown"
    assert set(fields) == set(defaults)


def test_the_events_in_the_readme_are_those_that_exist() -> None:
    from tests.observe.test_events import KINDS

    table = README.split("| event | told when |")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`([a-z_]+)`", row.split("|")[1])}
    assert named == {kind.event for kind in KINDS}


def test_the_project_file_names_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    tool = project["tool"]
    for name in tool["setuptools"]["packages"]["find"]["include"]:
        assert (ROOT / name.rstrip("*")).is_dir()
    for name in [*tool["pyright"]["include"], *tool["pyright"]["strict"], *tool["pytest"]["ini_options"]["testpaths"]]:
        assert (ROOT / name).exists(), name
    for name in [project["project"]["readme"], *project["project"]["license-files"]]:
        assert (ROOT / name).is_file(), name
    assert set(project["project"]["scripts"]) == {name.split(" ")[0] for name in commands()}
    for package, patterns in tool["setuptools"]["package-data"].items():
        for pattern in patterns:
            assert list((ROOT / package.replace(".", "/")).glob(pattern)), pattern


def test_folders_of_the_layout_exist() -> None:
    for name in ("swarm", "peers", "proto/swarm/v1", "deploy", "tests/e2e", "tests/bench", ".ci"):
        assert (ROOT / name).is_dir(), name
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_tests_mirror_the_product() -> None:
    for path in (ROOT / "swarm").glob("*/*.py"):
        assert (ROOT / "tests" / path.parent.name).is_dir(), path.parent.name


def test_the_version_is_in_the_changelog() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.search(rf"^## {re.escape(version)} \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_presets_load_and_are_named_after_their_file() -> None:
    assert "demo" in presets()
    for name in presets():
        assert RunSpec.load(name).name == name


def test_the_compiled_protocol_has_every_message_of_its_sources() -> None:
    for path in (ROOT / "proto" / "swarm" / "v1").glob("*.proto"):
        for name in re.findall(r"^message (\w+)", path.read_text(), re.MULTILINE):
            assert message_class(name).DESCRIPTOR.full_name == f"swarm.v1.{name}"
