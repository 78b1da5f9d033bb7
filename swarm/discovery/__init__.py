"""The directory of peers: signed records on a hivemind DHT that runs in this process's own loop."""

from swarm.discovery.directory import Directory
from swarm.discovery.records import PeerRecord, RecordSeal

__all__ = ["Directory", "PeerRecord", "RecordSeal"]
