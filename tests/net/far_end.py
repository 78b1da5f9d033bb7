"""The other end of a session in a process of its own, for tests that stop or kill it.

Reads one JSON line (credentials, heartbeat, and for a client the server), prints its address, and stays.
"""

import asyncio
import json
import sys

from swarm.net.authority import Role
from swarm.net.credentials import Credentials
from swarm.net.server import PeerServer
from swarm.net.session import Session, SessionService, open_session


def credentials_fields(credentials: Credentials) -> dict[str, str]:
    return {
        "run_id": credentials.run_id,
        "peer_id": credentials.peer_id,
        "key_pem": credentials.key_pem.decode(),
        "certificate_pem": credentials.certificate_pem.decode(),
        "authority_pem": credentials.authority_pem.decode(),
    }


def credentials_from(fields: dict[str, str]) -> Credentials:
    pems = (fields[name].encode() for name in ("key_pem", "certificate_pem", "authority_pem"))
    return Credentials(fields["run_id"], fields["peer_id"], Role.PEER, *pems)


async def echo(session: Session) -> None:
    async for message in session:
        await session.send(message)


async def main() -> None:
    order = json.loads(sys.stdin.readline())
    credentials = credentials_from(order["credentials"])
    if order["server"] is None:
        server = PeerServer(credentials, ["127.0.0.1:0"], [SessionService(echo, heartbeat_s=order["heartbeat_s"])])
        print((await server.start())[0], flush=True)
        await asyncio.Event().wait()
    address, peer_id = order["server"]
    session = await open_session(address, credentials, peer_id, 20.0, heartbeat_s=order["heartbeat_s"])
    print("connected", flush=True)
    await echo(session)


if __name__ == "__main__":
    asyncio.run(main())
