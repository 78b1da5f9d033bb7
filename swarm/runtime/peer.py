"""A volunteer's process: enrol, find the others, host one stage until the run is finished."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from typing import Any

from swarm.config.peer import PeerSettings
from swarm.config.spec import RunSpec
from swarm.core.frame import PROTOCOL_VERSION
from swarm.core.messages import Goodbye, Hello, PeerMessage
from swarm.data import Sampler, open_corpus
from swarm.discovery import Directory, PeerRecord
from swarm.errors import CheckpointError, IdentityInUseError, RefusedError, SwarmError, UnreachableError
from swarm.model.trainer import StageTrainer
from swarm.net.addresses import announced
from swarm.net.control import decode_coordinator_message, encode_peer_message
from swarm.net.enrolment import Enrolment, enrol, keep_renewed
from swarm.net.identity import Identity
from swarm.net.invitation import Invitation
from swarm.net.pipeline import PipelineService
from swarm.net.server import PeerServer
from swarm.net.session import Session, open_session
from swarm.observe.events import Enrolled, EventLog, Left, Resources, Started, Waiting, Warned
from swarm.observe.loop import LoopMeter
from swarm.observe.process import resident_bytes
from swarm.runtime.bootstrap import RECORD_LIFETIME_S, STOP_GRACE_S, announced_hosts, check_same_run
from swarm.runtime.compute import HOUSEKEEPING, ComputeThread
from swarm.runtime.coordinator import measured
from swarm.runtime.neighbours import Neighbours
from swarm.runtime.recovery import StageDisk
from swarm.runtime.stage import StageRunner

REPORT_EVERY_S = 2.0
"""Between two reports of links and resources."""

SESSION_DEADLINE_S = 10.0
FIRST_RETRY_S = 0.3
LONGEST_RETRY_S = 5.0
IDENTITY_GRACE_S = 20.0
"""How long a peer that was restarted waits for the coordinator to notice that its former process is gone."""

"""Backoff between attempts to reach the coordinator: doubles from the first to the longest, with jitter."""


async def join(settings: PeerSettings, log: EventLog) -> int:
    """Host a stage until the run is finished or the task is cancelled.

    Returns:
        Exit code 0.

    Raises:
        SwarmError: this peer cannot take part (its ``exit_code`` tells why) or cannot go on.
    """
    async with AsyncExitStack() as stack:
        peer = await _Peer.prepare(settings, log, stack)
        try:
            await peer.run()
        finally:
            await peer.leave()
    return 0


class _Peer:
    """The parts of a running peer."""

    settings: PeerSettings
    spec: RunSpec
    enrolment: Enrolment
    directory: Directory
    runner: StageRunner
    identity: Identity

    def __init__(self, settings: PeerSettings, log: EventLog) -> None:
        self.settings = settings
        self.log = log
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.session: Session | None = None
        self.corpus_digest = ""
        self.meter = LoopMeter()
        self._renewed = asyncio.Event()
        self.instance = secrets.token_hex(8)

    @classmethod
    async def prepare(cls, settings: PeerSettings, log: EventLog, stack: AsyncExitStack) -> _Peer:
        """Everything up to the first session; what it opens is closed by ``stack``."""
        peer = cls(settings, log)
        invitation = Invitation.parse(settings.invitation, accept_expired=True)
        folder = settings.state_dir
        identity = peer.identity = Identity.open(folder)
        enrolment = await enrol(invitation, identity, state_dir=folder)
        peer.enrolment, peer.spec = enrolment, enrolment.spec
        spec, credentials = enrolment.spec, enrolment.credentials
        check_same_run(folder, spec.canonical_json())
        log.emit(Enrolled(run_id=spec.run_id, certificate_expires_at_s=credentials.expires_at_s))
        if not 0 <= settings.stage < spec.model.stages:
            raise RefusedError(
                f"There is no stage {settings.stage} in run {spec.name!r}.",
                meaning="The peer was not started.",
                remedy=f"Choose a stage from 0 to {spec.model.stages - 1}.",
            )
        compute = ComputeThread(background=settings.background)
        stack.callback(compute.close)
        disk = StageDisk(spec, settings.stage, folder / f"stage-{settings.stage}", peer._report_checkpoint)
        stack.callback(disk.close)
        trainer = await compute.submit(
            HOUSEKEEPING, lambda: StageTrainer(spec, settings.stage, device=settings.device, threads=settings.threads)
        )
        sampler = None
        if settings.stage == 0:
            corpus = await asyncio.to_thread(open_corpus, spec.data, spec.model, folder / "corpus")
            peer.corpus_digest, sampler = corpus.digest, Sampler(spec, corpus)
        peer.runner = StageRunner(
            spec,
            settings.stage,
            trainer=trainer,
            compute=compute,
            disk=disk,
            sampler=sampler,
            report=peer._report,
            log=log,
        )
        await peer.runner.recover()
        pipeline = PipelineService(peer.runner.on_frame, peer.runner.check_frame)
        server = PeerServer(credentials, [settings.listen], [pipeline])
        bound = await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        addresses = tuple(announced(bound, settings.announce, settings.local))
        peer.directory = await Directory.start(
            spec.run_id,
            credentials,
            credentials.verify_record,
            initial_peers=enrolment.dht_addresses,
            local=settings.local,
            announce_hosts=announced_hosts(settings.announce),
            port=settings.dht_port,
            identity_path=folder / "dht.key",
            on_failed=lambda error: peer.failed.done() or peer.failed.set_exception(error),
        )
        stack.push_async_callback(peer.directory.close)
        record = PeerRecord(spec.run_id, identity.peer_id, settings.stage, "peer", addresses, RECORD_LIFETIME_S)
        await peer.directory.publish(record)
        peer.runner.neighbours = Neighbours(
            spec,
            settings.stage,
            credentials,
            find=peer._addresses_of,
            on_lost=peer.runner.on_link_lost,
            on_refused=peer.runner.on_refused,
            on_unreachable=peer._warn_unreachable,
        )
        log.emit(
            Started(
                role="peer",
                peer_id=identity.peer_id,
                stage=settings.stage,
                run_id=spec.run_id,
                run_name=spec.name,
                device=str(trainer.device),
                addresses=addresses,
            )
        )
        return peer

    async def run(self) -> None:
        """Keep a session with the coordinator until the run is finished."""
        self.meter.start()
        background: list[Awaitable[Any]] = [self._sessions(), self._watch(), self._renew()]
        tasks = [asyncio.ensure_future(task) for task in background]
        done = asyncio.create_task(self.runner.finished.wait())
        try:
            await asyncio.wait([done, self.failed, self.runner.fault, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for future in (self.failed, self.runner.fault, *tasks):
                if future.done() and not future.cancelled():
                    future.result()
        finally:
            for task in (*tasks, done):
                task.cancel()
            await asyncio.gather(*tasks, done, return_exceptions=True)

    async def leave(self) -> None:
        """Tell the coordinator, stop training, keep what was trained."""
        session, self.session = self.session, None
        finished = self.runner.finished.is_set()
        reason = "the run is finished" if finished else "it was stopped"
        if session is not None:
            for report in self.runner.neighbours.reports() if self.runner.neighbours else ():
                session.send_nowait(encode_peer_message(report))
            session.send_nowait(encode_peer_message(Goodbye(reason)))
            await session.close("goodbye", reason)
        self.meter.stop()
        await asyncio.gather(self.runner.close(), self.directory.withdraw())
        self.log.emit(Left(reason))

    # the session

    async def _sessions(self) -> None:
        delay_s, refused_at_s = FIRST_RETRY_S, None
        while True:
            try:
                session = await self._open_session()
                await self._converse(session)
                delay_s, refused_at_s = FIRST_RETRY_S, None
            except UnreachableError as error:
                self.log.emit(Waiting(missing_stages=(), reason=f"no coordinator: {error.what}"))
            except IdentityInUseError as error:
                now_s = time.monotonic()
                refused_at_s = refused_at_s or now_s
                if now_s - refused_at_s > IDENTITY_GRACE_S:
                    raise
                self.log.emit(Waiting(missing_stages=(), reason=error.what))
            await asyncio.sleep(delay_s * (0.5 + random.random()))
            delay_s = min(2 * delay_s, LONGEST_RETRY_S)

    async def _open_session(self) -> Session:
        coordinator = self.enrolment.coordinator_id
        addresses = await self._addresses_of(coordinator) or tuple(self.enrolment.bootstrap_addresses)
        reason = "its address is not known"
        for address in addresses:
            try:
                return await open_session(address, self.enrolment.credentials, coordinator, SESSION_DEADLINE_S)
            except UnreachableError as error:
                reason = error.what
        raise UnreachableError(f"Coordinator {coordinator} cannot be reached: {reason}")

    async def _converse(self, session: Session) -> None:
        self.session = session
        hello = Hello(
            run_id=self.spec.run_id,
            protocol=PROTOCOL_VERSION,
            stage=self.settings.stage,
            state=self.runner.state(),
            corpus_digest=self.corpus_digest,
            instance=self.instance,
        )
        session.send_nowait(encode_peer_message(hello))
        try:
            async for data in session:
                await self.runner.handle(decode_coordinator_message(data))
                if self._renewed.is_set():
                    self._renewed.clear()
                    session.send_nowait(encode_peer_message(Goodbye("its certificate was renewed")))
                    await session.close("renewed", "its certificate was renewed")
        except SwarmError:
            self.session = None
            raise
        # Not when cancelled: whoever leaves says goodbye in this session.
        self.session = None
        reason = session.lost_reason or "the coordinator closed the session"
        self.log.emit(Waiting(missing_stages=(), reason=f"no coordinator: {reason}"))

    def _report(self, message: PeerMessage) -> None:
        if self.session is not None:
            self.session.send_nowait(encode_peer_message(message))

    async def _addresses_of(self, peer_id: str) -> tuple[str, ...]:
        record = await self.directory.find_peer(peer_id)
        return record.addresses if record else ()

    # background

    async def _watch(self) -> None:
        training = False
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if not training and self.runner.protocol.version > 0:
                training = True
                self.meter.reset()
            neighbours = self.runner.neighbours
            for report in neighbours.reports() if neighbours else ():
                self._report(report)
                self.log.emit(measured(self.spec, report))
            self.log.emit(
                Resources(
                    loop_stall_p99_s=self.meter.p99_s,
                    rss_bytes=resident_bytes(),
                    in_flight_bytes=self.runner.in_flight_bytes,
                )
            )

    async def _renew(self) -> None:
        credentials = self.enrolment.credentials
        credentials.on_renewed(self._renewed.set)
        await keep_renewed(credentials, self.identity, lambda: self.enrolment.bootstrap_addresses)

    def _warn_unreachable(self, stage: int, peer_id: str, reason: str) -> None:
        self.log.emit(
            Warned(
                "neighbour_unreachable",
                f"Stage {stage} (peer {peer_id}) cannot be reached: {reason}",
                "No step is trained until it can; it is tried again.",
                "Its owner should check --listen, --announce and the firewall; its address comes from the directory.",
            )
        )

    def _report_checkpoint(self, error: CheckpointError) -> None:
        self.log.emit(Warned(error.code, error.what, error.meaning, error.remedy))
