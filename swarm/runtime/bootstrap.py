"""The bootstrap daemon: entry to the DHT, enrolment, and the run's first coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from swarm.config.peer import BootstrapSettings
from swarm.core.frame import dense_bytes_per_token
from swarm.core.view import Member
from swarm.discovery import Directory, PeerRecord
from swarm.errors import SpecError, SwarmError
from swarm.net.addresses import announced, parse_address
from swarm.net.authority import Role, RunAuthority
from swarm.net.credentials import Credentials
from swarm.net.enrolment import EnrolmentService, keep_issued
from swarm.net.identity import Identity
from swarm.net.invitation import Invitation, InvitationBook
from swarm.net.server import PeerServer
from swarm.net.session import SessionService
from swarm.observe.events import EventLog, InvitationIssued, Left, Result, Started
from swarm.runtime.commits import CommitLog
from swarm.runtime.coordinator import CoordinatorRunner
from swarm.runtime.status import RunStatus, StatusService

RECORD_LIFETIME_S = 60.0
"""How long a directory entry outlives its owner; it is refreshed well before."""

STOP_GRACE_S = 2.0

LEAVE_S = 10.0
"""How long the result waits for the peers to leave."""


async def serve(settings: BootstrapSettings, log: EventLog) -> int:
    """Run the daemon until it is cancelled, or until ``linger_s`` after the run has finished.

    Returns:
        Exit code 0.

    Raises:
        SwarmError: it cannot start (port in use, state of another run, unreadable key), or its DHT failed for good.
    """
    spec = settings.spec
    folder = settings.state_dir
    check_same_run(folder, spec.canonical_json())
    began = time.monotonic()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        identity = Identity.open(folder)
        authority = RunAuthority.open(folder, spec.run_id)
        credentials = Credentials.issue(authority, identity, Role.BOOTSTRAP, settings.certificate_lifetime_s)
        book = InvitationBook(folder)
        commits = CommitLog(folder / "commits.jsonl")
        stack.callback(commits.close)
        runner = CoordinatorRunner(spec, commits, log, allow_restart=settings.allow_restart)
        directory: Directory | None = None

        def dht_addresses() -> list[str]:
            return directory.addresses() if directory is not None else []

        enrolment = EnrolmentService(
            authority,
            book,
            spec,
            dht_addresses=dht_addresses,
            coordinator_id=identity.peer_id,
            certificate_lifetime_s=settings.certificate_lifetime_s,
        )
        services = [enrolment, SessionService(runner.serve), StatusService(lambda: _status(runner, identity.peer_id))]
        server = PeerServer(credentials, [settings.listen], services)
        bound = await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        addresses = announced(bound, settings.announce, settings.local)
        directory = await Directory.start(
            spec.run_id,
            credentials,
            credentials.verify_record,
            initial_peers=(),
            local=settings.local,
            announce_hosts=announced_hosts(settings.announce),
            port=settings.dht_port,
            identity_path=folder / "dht.key",
            on_failed=lambda error: failed.done() or failed.set_exception(error),
        )
        stack.push_async_callback(directory.close)
        await directory.publish(
            PeerRecord(spec.run_id, identity.peer_id, None, "coordinator", tuple(addresses), RECORD_LIFETIME_S)
        )
        log.emit(
            Started(
                role="bootstrap",
                peer_id=identity.peer_id,
                stage=None,
                run_id=spec.run_id,
                run_name=spec.name,
                device="cpu",
                addresses=tuple(addresses),
            )
        )
        invitation = Invitation.create(
            authority, addresses, uses=settings.uses, lifetime_s=settings.invitation_lifetime_s, book=book
        )
        if settings.invitation_file is not None:
            write_private(settings.invitation_file, invitation.encode() + "\n")
        log.emit(InvitationIssued(invitation.encode(), invitation.expires_at_s, settings.uses))
        tasks: list[asyncio.Task[Any]] = [
            asyncio.create_task(runner.tick(), name="coordinator-clock"),
            asyncio.create_task(keep_issued(credentials, authority, identity), name="own-certificate"),
        ]
        stack.callback(lambda: [task.cancel() for task in tasks])
        finished = asyncio.create_task(runner.finished.wait(), name="run-finished")
        tasks.append(finished)
        await asyncio.wait([finished, failed, *tasks[:2]], return_when=asyncio.FIRST_COMPLETED)
        for task in (failed, *tasks[:2]):
            if task.done():
                task.result()
        seconds = time.monotonic() - began
        # The last reports of the links arrive while the peers leave.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(settings.linger_s, LEAVE_S)):
                await runner.left.wait()
        log.emit(_result(runner, seconds))
        if math.isinf(settings.linger_s):
            await asyncio.wait([failed, *tasks[:2]], return_when=asyncio.FIRST_COMPLETED)
            for task in (failed, *tasks[:2]):
                if task.done():
                    task.result()
        log.emit(Left("the run is finished"))
    return 0


def announced_hosts(announce: str | None) -> list[str]:
    """The hosts of ``--announce``, for the directory, whose port is another."""
    return [parse_address(text, default_port=1).host for text in announce.split(",")] if announce else []


def _result(runner: CoordinatorRunner, seconds: float) -> Result:
    spec = runner.spec
    wire, dense = runner.wire_bytes_per_token(), dense_bytes_per_token(spec)
    last = runner.core.commits.get(spec.steps)
    return Result(
        steps=runner.core.committed,
        train_loss=last.loss if last else math.nan,
        val_loss=runner.validation[1] if runner.validation else math.nan,
        tokens_per_s=runner.pace.tokens_per_s or 0.0,
        wire_bytes_per_token=wire,
        dense_bytes_per_token=dense,
        compression=dense / wire if wire else 0.0,
        peers=spec.model.stages,
        seconds=seconds,
    )


def _status(runner: CoordinatorRunner, peer_id: str) -> RunStatus:
    core, spec = runner.core, runner.spec
    last = core.commits.get(core.committed)
    step, loss = runner.validation or (0, math.nan)
    return RunStatus(
        run_id=spec.run_id,
        run_name=spec.name,
        phase=core.phase.value,
        step=core.committed,
        steps=spec.steps,
        stages=spec.model.stages,
        loss=last.loss if last else math.nan,
        validation_loss=loss,
        validation_step=step,
        tokens_per_s=-1.0 if runner.pace.tokens_per_s is None else runner.pace.tokens_per_s,
        members=tuple(Member(stage, member) for stage, member in core.members.items()),
        missing_stages=core.missing_stages,
        links=tuple(runner.links()),
        coordinator=peer_id,
        view=core.number,
    )


def check_same_run(folder: Path, canonical_spec: str) -> None:
    """Keep the spec in the state directory, and refuse to start another run in it.

    Raises:
        SpecError: the directory belongs to another run.
    """
    path = folder / "spec.json"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not path.exists():
            write_private(path, canonical_spec)
            return
        known = path.read_text()
    except OSError as error:
        raise SwarmError(
            f"The state directory {folder} cannot be used: {error}.",
            meaning="Nothing was started.",
            remedy="Choose a directory that this user may write to with --state-dir.",
        ) from error
    if known != canonical_spec:
        raise SpecError(
            f"The state directory {folder} belongs to a run with another spec.",
            meaning="Its certificates, checkpoints and commits do not fit; nothing was changed.",
            remedy="Choose another --state-dir, or the spec that the directory was made with.",
        )


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, atomically."""
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary.unlink(missing_ok=True)
    temporary.touch(0o600)
    temporary.write_text(text)
    temporary.replace(path)
