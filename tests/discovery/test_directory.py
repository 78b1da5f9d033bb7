"""The directory on loopback with real daemons: what is published is found, and nobody can speak for another."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import msgpack
import pytest

from swarm.discovery.records import MAX_RECORD_BYTES, coordinator_key, peer_key, seal_record, stage_key
from swarm.errors import ClockSkewError, SpecError, UnreachableError, UsageError
from swarm.net.authority import Role
from tests.discovery.nodes import eventually, record, said, start
from tests.net.certified import RUN_ID, member

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWNRuAcue4i9XQeJQjpupTGN1MBpQSuzJLvHDFd7wkJpgp"
ALICE_KEY = peer_key(RUN_ID, member("alice").peer_id)


async def test_three_nodes_find_each_other_by_name_by_stage_and_the_coordinator(node):
    boot = await node("boot", role=Role.BOOTSTRAP)
    alice, bob = await node("alice", boot), await node("bob", boot)
    coordinator = record("boot", None, role=Role.BOOTSTRAP)
    await boot.publish(coordinator)
    await alice.publish(record("alice", 1))
    await bob.publish(record("bob", 1))
    for one in (boot, alice, bob):
        assert said(await one.find_coordinator()) == coordinator
        assert said(await one.find_peer(member("alice").peer_id)) == record("alice", 1)
        names = {found.peer_id for found in await one.find_stage(1)}
        assert names == {member("alice").peer_id, member("bob").peer_id}
        assert await one.find_stage(2) == []
        assert await one.find_peer("nobody") is None


async def test_a_peer_that_moves_is_found_at_its_new_stage_only(node):
    boot = await node("boot")
    alice = await node("alice", boot)
    await alice.publish(record("alice", 1))
    await alice.publish(record("alice", 2))
    assert await boot.find_stage(1) == []
    assert [said(found) for found in await boot.find_stage(2)] == [record("alice", 2)]


async def test_a_withdrawn_peer_is_not_found_and_may_come_back(node):
    boot = await node("boot")
    alice = await node("alice", boot)
    await alice.publish(record("alice"))
    await alice.withdraw()
    assert await boot.find_peer(member("alice").peer_id) is None
    assert await boot.find_stage(0) == []
    await alice.publish(record("alice"))
    assert said(await boot.find_peer(member("alice").peer_id)) == record("alice")


async def test_a_record_expires_when_its_peer_is_gone_and_lives_on_while_it_is_there(node):
    boot = await node("boot")
    alice, bob = await node("alice", boot), await node("bob", boot)
    await alice.publish(record("alice", lifetime_s=2.0))
    await bob.publish(record("bob", lifetime_s=2.0))
    gone = (await boot.find_peer(member("alice").peer_id)).expires_at_s
    await alice.close()

    async def expired() -> bool:
        boot.forget(member("alice").peer_id)
        return await boot.find_peer(member("alice").peer_id) is None

    await eventually(expired, 5.0)
    assert time.time() >= gone
    boot.forget(member("bob").peer_id)
    assert (await boot.find_peer(member("bob").peer_id)).expires_at_s > gone


async def test_a_stranger_can_join_the_dht_but_not_speak_for_a_peer(node):
    import hivemind

    boot = await node("boot")
    alice = await node("alice", boot)
    await alice.publish(record("alice"))
    later = time.time() + 100
    forged = replace(record("alice"), addresses=("evil.example:1",))
    lies = {
        "unsigned": b"evil",
        "not even bytes": ["evil"],
        "tampered": seal_record(record("alice"), ALICE_KEY, later, member("alice")).replace(b"alice.", b"mallo."),
        "by another peer": seal_record(forged, ALICE_KEY, later, member("mallory")),
        "of another run": seal_record(forged, ALICE_KEY, later, member("alice", run_id="cd" * 16)),
        "moved from another of her keys": seal_record(record("alice"), stage_key(RUN_ID, 0), later, member("alice")),
        "good, but of another end": seal_record(record("alice"), ALICE_KEY, later - 1, member("alice")),
        "too large": b"x" * (MAX_RECORD_BYTES + 1),
        "made of nesting": msgpack.packb([b"\x91" * 900, b"", b""]),
    }
    stranger = await hivemind.dht.DHTNode.create(initial_peers=boot.addresses())
    try:
        for lie, value in lies.items():
            alice_s = {"subkey": member("alice").peer_id, "expiration_time": later}
            assert not await stranger.store(ALICE_KEY, value, exclude_self=True, **alice_s), lie
            assert await stranger.store(ALICE_KEY, value, num_workers=1, **alice_s) is not None  # keeps it itself
            boot.forget(member("alice").peer_id)
            assert said(await boot.find_peer(member("alice").peer_id)) == record("alice"), lie
        usurped = coordinator_key(RUN_ID)
        usurper = replace(record("alice"), role="coordinator")
        value = seal_record(usurper, usurped, later, member("alice"))
        assert not await stranger.store(
            usurped, value, subkey=member("alice").peer_id, expiration_time=later, exclude_self=True
        )
        assert await boot.find_coordinator() is None
    finally:
        await stranger.shutdown()


async def test_unreachable_initial_peers_are_named_within_the_deadline():
    began = time.monotonic()
    with pytest.raises(UnreachableError, match=r"tcp/1/p2p/12D3KooWNRu\w+: .*refused") as refused:
        await start("alice", NOBODY, deadline_s=1.0)
    assert refused.value.exit_code == 3
    assert time.monotonic() - began < 1.0 + 6.0


async def test_one_reachable_initial_peer_of_several_suffices(node):
    boot = await node("boot")
    await boot.publish(record("boot"))
    alice = await node("alice", NOBODY, "not an address", boot)
    assert said(await alice.find_peer(member("boot").peer_id)) == record("boot")


async def test_clock_skew_is_reported_with_the_offset(node, monkeypatch):
    import sys

    from hivemind.dht import protocol

    boot = await node("boot")

    def an_hour_ahead_when_answering() -> float:
        answering = sys._getframe(1).f_code.co_name == "rpc_ping"
        return time.time() + (3600 if answering else 0)

    monkeypatch.setattr(protocol, "get_dht_time", an_hour_ahead_when_answering)
    with pytest.raises(ClockSkewError, match=r"off by -360\d\.\d s") as refused:
        await start("alice", boot)
    assert refused.value.exit_code == 4


async def test_a_port_in_use_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"127.0.0.1 port {port}: Address already in use"):
            await start("alice", port=port)


async def test_the_multiaddress_survives_a_restart_of_the_process(node, tmp_path):
    path = tmp_path / "dht.key"
    first = await node("boot", identity_path=path)
    addresses = first.addresses()
    assert path.stat().st_mode & 0o777 == 0o600
    await first.close()
    again = await node("boot", identity_path=path, port=int(addresses[0].split("/")[4]))
    assert again.addresses() == addresses


async def test_a_damaged_key_is_named(tmp_path):
    path = tmp_path / "dht.key"
    path.write_bytes(b"\xff\xff")
    with pytest.raises(SpecError, match=r"dht\.key cannot be used"):
        await start("boot", identity_path=path)


async def test_a_restarted_bootstrap_is_joined_again_by_those_who_knew_it(node, tmp_path, monkeypatch):
    monkeypatch.setattr("swarm.discovery.directory.REJOIN_S", 0.3)
    path = tmp_path / "dht.key"
    boot = await node("boot", identity_path=path)
    port = int(boot.addresses()[0].split("/")[4])
    alice = await node("alice", boot)
    await alice.publish(record("alice", lifetime_s=3.0))
    await boot.close()
    again = await node("boot", identity_path=path, port=port)

    async def found() -> bool:
        return await again.find_peer(member("alice").peer_id) is not None

    await eventually(found, 10.0)
