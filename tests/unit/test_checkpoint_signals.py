import signal
import subprocess
import sys
import time

import pytest

from lit_gpt_dist.callbacks.signals import CONTINUE, INTERRUPT, REQUEUE, Agreement, SignalWatch
from lit_gpt_dist.errors import EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("number", "wanted"), [(signal.SIGTERM, REQUEUE), (signal.SIGUSR1, REQUEUE), (signal.SIGINT, INTERRUPT)]
)
def test_the_first_signal_asks_for_a_stop(number, wanted):
    ended = []
    watch = SignalWatch(ended.append)
    assert watch.wanted == CONTINUE
    watch.receive(number, now=100.0)
    assert watch.wanted == wanted
    assert ended == []


def test_an_echo_of_the_first_is_no_second_one():
    """srun and launchers pass a signal on to processes that also got it themselves."""
    ended = []
    watch = SignalWatch(ended.append)
    watch.receive(signal.SIGTERM, now=100.0)
    watch.receive(signal.SIGTERM, now=100.4)
    assert ended == []
    watch.receive(signal.SIGTERM, now=102.0)
    assert ended == [128 + signal.SIGTERM]


def test_ctrl_c_twice_ends_at_once():
    ended = []
    watch = SignalWatch(ended.append)
    watch.receive(signal.SIGINT, now=100.0)
    watch.receive(signal.SIGINT, now=101.5)
    assert ended == [EXIT_INTERRUPTED]


def test_one_rank_agrees_with_itself_at_once():
    talk = Agreement()
    assert [talk.exchange(said) for said in (0, 0, 2)] == [0, 0, 2]
    assert talk.finish() == 0


STUCK = """
import ctypes, os, sys
from lit_gpt_dist.callbacks.signals import SignalWatch
SignalWatch(os._exit).start()
print("ready", flush=True)
ctypes.CDLL(None).poll(None, 0, 60_000)  # as in a collective that never ends: no Python runs
ctypes.CDLL(None).poll(None, 0, 60_000)
ctypes.CDLL(None).poll(None, 0, 60_000)
"""


def test_a_second_signal_ends_a_process_that_is_stuck_outside_python():
    process = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(1.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.stdout.close()


def test_the_former_handlers_are_back_afterwards():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    watch = SignalWatch(lambda code: None)
    watch.start()
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    watch.stop()
    assert before == {number: signal.getsignal(number) for number in before}
