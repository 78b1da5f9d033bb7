"""The commands explain themselves, start fast, and end with an exit code and a sentence."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from peers import swarm_bootstrap, swarm_peer
from peers.demo import to_toml
from swarm.config.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
HELP_CPU_S = 1.5
HEAVY = ("torch", "hivemind", "grpc", "numpy")

PEER, BOOTSTRAP = "peers.swarm_peer", "peers.swarm_bootstrap"
COMMANDS = [(PEER,), (PEER, "join"), (PEER, "status"), (PEER, "demo"), (BOOTSTRAP,)]


def call(command: tuple[str, ...] | str, *arguments: str) -> Result:
    module, *rest = (command,) if isinstance(command, str) else command
    main = swarm_bootstrap.main if module == BOOTSTRAP else swarm_peer.main
    return CliRunner().invoke(main, [*rest, *arguments])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("option", ["--help", "-h"])
def test_help_has_an_example(command: tuple[str, ...], option: str) -> None:
    result = call(command, option)
    assert result.exit_code == 0
    assert "Example" in result.output
    assert ("swarm-bootstrap" if command[0] == BOOTSTRAP else "swarm-peer") in result.output.split("Example")[1]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_is_quick_and_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    script = (
        f"import sys; from {command[0]} import main\n"
        f"try: main([*{list(command[1:])!r}, '--help'])\n"
        f"finally: print(sorted(name for name in {HEAVY!r} if name in sys.modules), file=sys.stderr)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    # Time on a processor, since the machine may be busy with other tests.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_CPU_S


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((PEER, "dance"), "No such command 'dance'"),
        ((PEER, "join", "swarm1.x"), "Missing option '--stage'"),
        ((PEER, "join", "--stage", "0"), "Missing argument 'INVITATION'"),
        ((PEER, "join", "--stage", "first", "swarm1.x"), "'first' is not a valid integer"),
        ((PEER, "join", "--stage", "-1", "swarm1.x"), "-1 is not in the range"),
        ((PEER, "join", "--stage", "0", "--threads", "0", "swarm1.x"), "0 is not in the range"),
        ((PEER, "join", "--stage", "0", "--dht-port", "65536", "swarm1.x"), "65536 is not in the range"),
        ((PEER, "join", "--stage", "0", "--gpu", "swarm1.x"), "No such option"),
        ((PEER, "demo", "--steps", "0"), "0 is not in the range"),
        ((BOOTSTRAP,), "Missing option '--spec'"),
        ((BOOTSTRAP, "--spec", "demo", "--uses", "0"), "0 is not in the range"),
        ((BOOTSTRAP, "--spec", "demo", "--uses", "10001"), "10001 is not in the range"),
        ((BOOTSTRAP, "--spec", "demo", "--dht-port", "-1"), "-1 is not in the range"),
        ((BOOTSTRAP, "--spec", "demo", "--certificates", "9s"), "9s is shorter than 10s"),
        ((BOOTSTRAP, "--spec", "demo", "--expires", "0d"), "0d is shorter than 1s"),
    ],
)
def test_a_wrong_command_line_ends_with_2(arguments: tuple[str, ...], words: str) -> None:
    result = call(arguments)
    assert result.exit_code == 2
    assert words in result.output


@pytest.mark.parametrize("text", ["90", "1w", "-5s", "1.5.2h", "s", "", "12 h", "infd"])
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    result = call(BOOTSTRAP, "--spec", "demo", "--expires", text)
    assert result.exit_code == 2
    assert "is not a duration such as 90s, 15m, 12h or 30d" in result.output.replace("\n", " ")


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90.0), ("15m", 900.0), ("12h", 43_200.0), ("30d", 2_592_000.0), ("0.5h", 1800.0)]
)
def test_durations(text: str, seconds: float) -> None:
    assert swarm_bootstrap.Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "words"),
    [
        ((PEER, "join", "--stage", "0", "no-such-file"), 4, "bad_invitation", "no-such-file"),
        ((PEER, "join", "--stage", "0", "swarm1.abc"), 4, "bad_invitation", "altered or cut short"),
        ((PEER, "status", "swarm1.abc"), 4, "bad_invitation", "altered or cut short"),
        ((PEER, "demo", "--spec", "no-such-preset"), 2, "bad_spec", "no-such-preset"),
        ((BOOTSTRAP, "--spec", "no-such-preset"), 2, "bad_spec", "no-such-preset"),
    ],
)
def test_an_error_is_told_to_people_and_to_programs(
    arguments: tuple[str, ...], exit_code: int, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    people = call(arguments)
    assert people.exit_code == exit_code
    assert people.stdout == ""
    assert people.stderr.startswith("Error: ")
    assert words in people.stderr.splitlines()[0]
    programs = call(arguments, "--json")
    assert programs.exit_code == exit_code
    (line,) = programs.stdout.splitlines()
    error = json.loads(line)
    assert (error["event"], error["code"]) == ("error", code)
    assert words in error["what"]
    # What happened is followed by what it means or what to do, each on a line of its own.
    more = [part for part in (error["meaning"], error["remedy"]) if part]
    assert [text.strip() for text in people.stderr.splitlines()[1:]] == more
    assert more


def test_a_state_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    result = call(BOOTSTRAP, "--spec", "demo", "--state-dir", str(tmp_path / "taken"))
    assert result.exit_code == 2
    assert "Choose another --state-dir" in result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"boundary": {"rank": 16, "ladder": [16, 8], "dtype": "int4"}},
        {"data": {"source": 'a "quoted" \\ path', "tokenizer": "bytes"}},
        {"optimizer": {"lr": 1e-5, "eps": 1e-12}},
        {"model": {"stages": 1, "tied_head": True}, "seed": 2**31 - 1},
    ],
)
def test_a_spec_written_as_toml_is_the_same_run(changes: dict[str, object], tmp_path: Path) -> None:
    spec = RunSpec.parse(changes)
    (tmp_path / "run.toml").write_text(to_toml(spec))
    assert RunSpec.load(tmp_path / "run.toml").run_id == spec.run_id
