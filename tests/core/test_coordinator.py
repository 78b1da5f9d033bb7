"""The coordinator's decisions on membership, roll-back and commits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from swarm.core.coordinator import (
    DISTURBED_QUIET_S,
    INSTALL_SILENCE_S,
    Action,
    Coordinator,
    Expel,
    Note,
    NoteKind,
    Persist,
    Phase,
    Rewind,
    Send,
)
from swarm.core.frame import PROTOCOL_VERSION
from swarm.core.ledger import Ledger
from swarm.core.messages import (
    Apply,
    Begin,
    CannotInstall,
    Collect,
    Collected,
    Commit,
    Disturbed,
    Hello,
    Install,
    Installed,
    PeerState,
    Prepared,
    Span,
    Waiting,
)
from swarm.core.schedule import in_flight_limit
from tests.core.loopback import small_spec

SPEC = small_spec()


def state(
    version: int = 0, *, prepared: int = 0, spans: tuple[Span, ...] = (), done: tuple[int, ...] = ()
) -> PeerState:
    return PeerState(version, prepared, Ledger(version + 1, done), spans or (Span(0, version),))


def hello(stage: int, *, run_id: str = SPEC.run_id, protocol: int = PROTOCOL_VERSION, corpus: str = "") -> Hello:
    return Hello(run_id, protocol, stage, state(), corpus)


def commits(last: int) -> list[Commit]:
    return [Commit(step, 1.0, 2.0, 3.0) for step in range(1, last + 1)]


def sent(actions: list[Action], kind: type) -> list:
    return [action.message for action in actions if isinstance(action, Send) and isinstance(action.message, kind)]


def with_members(coordinator: Coordinator) -> list[Action]:
    actions: list[Action] = []
    for stage in range(3):
        actions = coordinator.joined(f"p{stage}", hello(stage), 0.0)
    return actions


def collected(coordinator: Coordinator, states: list[PeerState], now: float = 0.0) -> list[Action]:
    actions: list[Action] = []
    for stage, peer_state in enumerate(states):
        actions = coordinator.received(f"p{stage}", Collected(coordinator.number, peer_state), now)
    return actions


def installed(coordinator: Coordinator, now: float = 0.0) -> list[Action]:
    actions: list[Action] = []
    for stage in range(3):
        actions = coordinator.received(f"p{stage}", Installed(coordinator.number), now)
    return actions


def running(last: int = 0) -> Coordinator:
    coordinator = Coordinator(SPEC, commits=commits(last))
    with_members(coordinator)
    collected(coordinator, [state(last)] * 3)
    installed(coordinator)
    assert coordinator.phase is Phase.RUNNING
    return coordinator


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello(3), "no stage 3"),
        (hello(0, run_id="other"), "has run other"),
        (hello(0, protocol=99), "speaks protocol 99"),
        (hello(1), "already taken by peer p1"),
    ],
)
def test_a_peer_that_does_not_fit_is_refused_and_told(message: Hello, words: str) -> None:
    coordinator = running()
    (action,) = coordinator.joined("late", message, 1.0)
    assert isinstance(action, Expel)
    assert words in action.error.what
    assert action.error.exit_code == 4
    assert coordinator.phase is Phase.RUNNING


def test_a_second_process_with_the_same_identity_is_refused() -> None:
    coordinator = running()
    (action,) = coordinator.joined("p0", hello(0), 1.0)
    assert isinstance(action, Expel)
    assert "already connected" in action.error.what


def test_a_head_with_other_text_is_refused() -> None:
    coordinator = Coordinator(SPEC)
    coordinator.joined("p0", hello(0, corpus="aaaa"), 0.0)
    coordinator.lost("p0", "gone", 1.0)
    (action,) = coordinator.joined("p0", hello(0, corpus="bbbb"), 2.0)
    assert isinstance(action, Expel)
    assert "digest" in action.error.what


def test_everybody_is_told_which_stages_are_missing() -> None:
    coordinator = Coordinator(SPEC)
    actions = coordinator.joined("p1", hello(1), 0.0)
    assert sent(actions, Waiting) == [Waiting((0, 2), "stage 1 joined")]


def test_the_view_begins_at_the_newest_version_that_all_can_restore() -> None:
    coordinator = Coordinator(SPEC, commits=commits(3))
    with_members(coordinator)
    actions = collected(coordinator, [state(3), state(2, spans=(Span(1, 2),)), state(3)])
    assert [action for action in actions if isinstance(action, Rewind)] == [Rewind(2)]
    install = sent(actions, Install)[0]
    assert (install.view.version, install.rollback) == (2, True)
    assert coordinator.committed == 2


def test_a_prepared_peer_gets_the_commit_it_missed_instead_of_a_rollback() -> None:
    coordinator = Coordinator(SPEC, commits=commits(3))
    with_members(coordinator)
    actions = collected(coordinator, [state(3), state(2, prepared=3, done=(0, 1, 2)), state(3)])
    install = sent(actions, Install)[0]
    assert (install.view.version, install.rollback) == (3, False)
    assert install.commits == (Commit(3, 1.0, 2.0, 3.0),)


def test_an_empty_peer_does_not_throw_the_run_away() -> None:
    coordinator = Coordinator(SPEC, commits=commits(3))
    with_members(coordinator)
    actions = collected(coordinator, [state(3), state(0), state(3)])
    (expelled,) = [action for action in actions if isinstance(action, Expel)]
    assert expelled.peer_id == "p1"
    assert "nothing of stage 1" in expelled.error.what
    assert coordinator.committed == 3
    assert coordinator.missing_stages == (1,)


def test_the_owner_can_allow_a_restart_from_nothing() -> None:
    coordinator = Coordinator(SPEC, commits=commits(3), allow_restart=True)
    with_members(coordinator)
    actions = collected(coordinator, [state(3), state(0), state(3)])
    assert sent(actions, Install)[0].view.version == 0


def test_commits_that_only_the_peers_remember_are_believed() -> None:
    coordinator = Coordinator(SPEC, commits=commits(2))
    with_members(coordinator)
    actions = collected(coordinator, [state(3)] * 3)
    assert sent(actions, Install)[0].view.version == 3
    assert coordinator.committed == 3


def test_a_peer_that_cannot_restore_leads_to_an_older_version() -> None:
    coordinator = Coordinator(SPEC, commits=commits(3))
    with_members(coordinator)
    collected(coordinator, [state(3), state(2, spans=(Span(1, 2),)), state(3)])
    actions = coordinator.received("p1", CannotInstall(coordinator.number, "broken"), 1.0)
    assert len(sent(actions, Collect)) == 3
    actions = collected(coordinator, [state(2), state(2, spans=(Span(1, 2),)), state(2)])
    assert sent(actions, Install)[0].view.version == 1


def test_the_head_is_told_only_what_is_outstanding() -> None:
    coordinator = Coordinator(SPEC)
    with_members(coordinator)
    collected(coordinator, [state(done=(0, 1)), state(done=(1, 2)), state(done=(0, 1, 2))])
    begin = sent(installed(coordinator), Begin)[0]
    assert begin.training == (0, 2)
    assert begin.evaluations == (0, 1)


def test_the_clip_factor_is_that_of_all_stages_together() -> None:
    coordinator = running()
    number = coordinator.number
    coordinator.received("p0", Prepared(number, 1, 9.0, 0.0), 1.0)
    coordinator.received("p2", Prepared(number, 1, 16.0, 2.5), 1.0)
    actions = coordinator.received("p1", Prepared(number, 1, 0.0, 0.0), 1.0)
    assert isinstance(actions[0], Persist), "the decision is kept before anyone hears of it"
    commit = actions[0].commit
    assert commit.grad_norm == pytest.approx(5.0)
    assert commit.clip_scale == pytest.approx(1.0 / 5.000001)
    assert commit.loss == 2.5
    assert sent(actions, Apply) == [Apply(number, commit)] * 3


def test_a_step_with_a_nan_gradient_is_committed_without_an_update() -> None:
    coordinator = running()
    for stage in range(3):
        norm = math.nan if stage == 1 else 1.0
        actions = coordinator.received(f"p{stage}", Prepared(coordinator.number, 1, norm, 1.0), 1.0)
    assert isinstance(actions[0], Persist)
    assert actions[0].commit.clip_scale == 0.0


def test_prepared_of_an_older_view_commits_nothing() -> None:
    coordinator = running()
    old = coordinator.number
    coordinator.received("p0", Disturbed(old, "p1", "reset"), 5.0)
    for stage in range(3):
        assert coordinator.received(f"p{stage}", Prepared(old, 1, 1.0, 1.0), 6.0) == []


def test_a_failed_link_leads_to_a_new_view_of_the_same_members() -> None:
    coordinator = running()
    actions = coordinator.received("p0", Disturbed(coordinator.number, "p1", "reset"), 5.0)
    assert sent(actions, Collect) == [Collect(coordinator.number)] * 3


@pytest.mark.parametrize("early", ["while the view is installed", "right after it began"])
def test_a_link_that_fails_early_is_answered_as_soon_as_the_view_has_run_for_a_moment(early: str) -> None:
    coordinator = Coordinator(SPEC)
    with_members(coordinator)
    collected(coordinator, [state()] * 3)
    report = Disturbed(coordinator.number, "p1", "reset")
    if early == "while the view is installed":
        assert coordinator.received("p0", report, 5.0) == []
    installed(coordinator, 5.0)
    if early == "right after it began":
        assert coordinator.received("p0", report, 5.1) == []
    assert coordinator.tick(5.0 + DISTURBED_QUIET_S / 2) == []
    assert sent(coordinator.tick(5.0 + DISTURBED_QUIET_S), Collect) == [Collect(coordinator.number)] * 3
    collected(coordinator, [state()] * 3, 6.0)
    installed(coordinator, 6.0)
    assert coordinator.tick(7.0) == [], "the new view was the answer"


def test_a_member_silent_while_the_view_is_formed_is_dropped() -> None:
    coordinator = Coordinator(SPEC)
    with_members(coordinator)
    for stage in (0, 2):
        coordinator.received(f"p{stage}", Collected(coordinator.number, state()), INSTALL_SILENCE_S)
    assert coordinator.tick(INSTALL_SILENCE_S - 1) == []
    actions = coordinator.tick(INSTALL_SILENCE_S + 1)
    assert [action.peer_id for action in actions if isinstance(action, Expel)] == ["p1"]
    assert coordinator.missing_stages == (1,)


def test_a_stalled_step_is_reported_with_the_stages_that_are_late_and_driven_again() -> None:
    coordinator = running()
    coordinator.received("p0", Prepared(coordinator.number, 1, 1.0, 0.0), 1.0)
    actions = coordinator.tick(coordinator.stall_deadline_s + 1.0)
    (note,) = [action for action in actions if isinstance(action, Note)]
    assert (note.kind, note.stages) == (NoteKind.STALLED, (1, 2))
    assert len(sent(actions, Collect)) == 3


def test_a_process_that_connects_again_takes_its_own_seat() -> None:
    coordinator = Coordinator(SPEC)
    coordinator.joined("p0", replace(hello(0), instance="one"), 0.0)
    actions = coordinator.joined("p0", replace(hello(0), instance="one"), 1.0)
    assert not [action for action in actions if isinstance(action, Expel)]
    (refused,) = coordinator.joined("p0", replace(hello(0), instance="two"), 2.0)
    assert isinstance(refused, Expel)
    assert refused.error.code == "identity_in_use"


def test_the_stall_deadline_doubles_until_a_step_commits() -> None:
    coordinator = running()
    first = coordinator.stall_deadline_s
    coordinator.tick(first + 1.0)
    assert coordinator.stall_deadline_s == 2 * first


@pytest.mark.parametrize(
    ("rtt_s", "beat_s", "limit"), [(0.0, None, 4), (0.0, 0.1, 4), (0.1, 0.1, 6), (0.25, 0.1, 9), (9.0, 0.1, 16)]
)
def test_enough_microbatches_are_in_flight_to_hide_the_round_trip(
    rtt_s: float, beat_s: float | None, limit: int
) -> None:
    assert in_flight_limit(3, 16, rtt_s, beat_s) == limit
