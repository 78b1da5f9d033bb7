"""The goodput meter on a virtual clock."""

from swarm.net.goodput import PROBE_AFTER_S, GoodputMeter


class Path:
    """Carries frames at ``rate`` bytes a second, after ``latency`` seconds; the receiver's clock is far off."""

    def __init__(self, rate: float, latency: float = 0.05):
        self.now = self.free = 0.0
        self.rate, self.latency = rate, latency
        self.meter = GoodputMeter(lambda: self.now)
        self.sequence = 0

    def send(self, size: int, *, first: int | None = None, after: float = 60.0) -> None:
        """``after``: seconds since the frame before was handed over; ``first``: bytes of the first of two chunks."""
        self.now += after
        self.sequence += 1
        self.meter.begins(self.sequence, waited=False)
        self.meter.sent(self.sequence)
        begin = max(self.now, self.free)
        first = size if first is None else first
        self.free = begin + size / self.rate
        sent, self.now = self.now, self.free + 2 * self.latency
        self.meter.arrived(self.sequence, size, first, 1e6 + begin + first / self.rate, 1e6 + self.free)
        self.now = sent


def test_nothing_is_known_before_bytes_had_to_wait_for_one_another():
    path = Path(1e6)
    for _ in range(10):
        path.send(8_000)
    assert path.meter.goodput_bytes_s is None
    assert path.meter.in_flight == 0


def test_a_frame_of_several_chunks_tells_at_once():
    path = Path(1e6)
    path.send(4_000_000, first=1_000_000)
    assert round(path.meter.goodput_bytes_s) == 1_000_000


def test_small_frames_tell_when_they_leave_back_to_back():
    path = Path(1e6)
    for n in range(10):
        path.send(8_000, after=0.0 if n else 1.0)
    assert round(path.meter.goodput_bytes_s) == 1_000_000


def test_small_frames_in_two_parts_tell_wherever_they_leave():
    path = Path(1e6)
    for _ in range(5):
        assert path.meter.wants_probe
        path.send(8_000, first=0)
    assert not path.meter.wants_probe
    assert round(path.meter.goodput_bytes_s) == 1_000_000


def test_probes_end_with_a_sample_and_begin_again_without_one():
    path = Path(1e6)
    assert path.meter.wants_probe
    path.send(100_000, first=0)
    assert not path.meter.wants_probe
    path.now += 2 * PROBE_AFTER_S
    assert path.meter.wants_probe


def test_idle_time_does_not_count():
    path = Path(1e6)
    for n in range(40):
        path.send(8_000, after=5.0 if n % 4 == 0 else 0.0)
    assert round(path.meter.goodput_bytes_s) == 1_000_000


def test_a_slower_path_shows_within_half_a_window():
    path = Path(1e6)
    for _ in range(15):
        path.send(2_000_000, first=1_000_000)
    path.rate = 1e5
    for _ in range(8):
        path.send(2_000_000, first=1_000_000)
    assert round(path.meter.goodput_bytes_s) == 100_000


def test_the_round_trip_is_the_shortest_of_late():
    path = Path(1e9, latency=0.02)
    path.send(10)
    path.latency = 0.5
    path.send(10)
    assert round(path.meter.rtt_s, 3) == 0.04


def test_a_new_connection_counts_from_one_again():
    path = Path(1e6)
    path.send(8_000)
    path.meter.begins(2, waited=False)
    path.meter.reconnected()
    assert path.meter.in_flight == 0
    path.sequence = 0
    path.send(40_000, after=0.0)
    assert path.meter.goodput_bytes_s is None
