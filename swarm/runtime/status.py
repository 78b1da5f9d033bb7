"""What a run looks like from outside: the ``Status`` service of the bootstrap, and its client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field

import grpc

from swarm.core.messages import LinkReport
from swarm.core.view import Member
from swarm.net.bootstrap import call_bootstrap
from swarm.net.control import extract, fill
from swarm.net.invitation import Invitation
from swarm.net.messages import message_class

METHOD = "/swarm.v1.Status/Get"
DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment. Losses are NaN while unknown, rates negative."""

    run_id: str
    run_name: str
    phase: str
    step: int
    steps: int
    stages: int
    loss: float
    validation_loss: float
    validation_step: int
    tokens_per_s: float
    members: tuple[Member, ...] = ()
    missing_stages: tuple[int, ...] = ()
    links: tuple[LinkReport, ...] = field(default=())
    coordinator: str = ""
    view: int = 0

    def as_dict(self) -> dict[str, object]:
        """As JSON-able fields; unknown figures become null."""
        fields = asdict(self)
        for key in ("loss", "validation_loss"):
            if fields[key] != fields[key]:
                fields[key] = None
        if self.tokens_per_s < 0:
            fields["tokens_per_s"] = None
        for link in fields["links"]:
            for key in ("goodput_bytes_s", "rtt_s"):
                if link[key] < 0:
                    link[key] = None
        return fields


class StatusService(grpc.GenericRpcHandler):
    """Answers anybody with a certificate of the run, invitations included."""

    def __init__(self, read: Callable[[], RunStatus]) -> None:
        self._read = read

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_unary_rpc_method_handler(self._get)

    async def _get(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        reply = message_class("StatusReply")()
        fill(reply, self._read())
        return reply.SerializeToString()


async def query(invitation: Invitation) -> RunStatus:
    """Ask the bootstrap addresses of an invitation, in their order.

    Raises:
        SwarmError: none of them answers within the deadline, or the invitation is not accepted.
    """
    data, _ = await call_bootstrap(
        invitation.addresses,
        invitation.credentials(),
        METHOD,
        message_class("StatusRequest")().SerializeToString(),
        deadline_s=DEADLINE_S,
    )
    reply = message_class("StatusReply")()
    reply.ParseFromString(data)
    return extract(RunStatus, reply)
