"""Links and sessions in the loop that peers use. In a process of its own: grpc.aio wants one loop in a process."""

import asyncio
import subprocess
import sys

import uvloop

from tests.net import test_link, test_session

SCENES = (
    test_link.test_frames_arrive_whole_in_order_and_with_their_sender,
    test_link.test_refused_frames_come_back_with_the_reason_and_the_link_goes_on,
    test_link.test_a_stopped_receiver_is_a_lost_link_and_connecting_again_works,
    test_session.test_messages_of_both_directions_arrive_in_order,
    test_session.test_a_farewell_brings_code_and_reason_after_what_was_sent_before,
    test_session.test_a_refusal_is_the_same_error_on_the_other_side,
)


async def play() -> None:
    assert isinstance(asyncio.get_running_loop(), uvloop.Loop)
    for scene in SCENES:
        await scene()


def test_links_and_sessions_work_in_uvloop():
    finished = subprocess.run([sys.executable, "-m", "tests.net.test_uvloop"], timeout=120, check=False)
    assert finished.returncode == 0


if __name__ == "__main__":
    uvloop.run(play())
