"""Signals that ask a run to save, and what happens to them afterwards."""

from __future__ import annotations

import signal
import threading

import pytest

from penstock.runtime.stop_signals import StopSignals

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@pytest.fixture
def earlier():
    """Handlers that were installed before, and the signals that they get."""
    received = []
    handlers = {number: (lambda n, _frame: received.append(n)) for number in SIGNALS}
    replaced = {number: signal.signal(number, handlers[number]) for number in SIGNALS}
    yield handlers, received
    for number, handler in replaced.items():
        signal.signal(number, handler)


def test_a_signal_sets_its_own_flag_and_goes_to_the_earlier_handler_afterwards(earlier):
    """SIGTERM asks to end, SIGUSR1 to go on; a flag that was cleared can be set again."""
    handlers, received = earlier
    signals = StopSignals()
    for _ in range(2):
        with signals as entered:
            assert entered is signals
            assert (signals.end, signals.save) == (False, False)
            signal.raise_signal(signal.SIGUSR1)
            assert (signals.end, signals.save) == (False, True)
            signals.save = False
            signal.raise_signal(signal.SIGTERM)
            assert (signals.end, signals.save) == (True, False)
            signal.raise_signal(signal.SIGUSR1)
            assert (signals.end, signals.save) == (True, True)
            assert not received
        assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
        signals.end = signals.save = False
    signal.raise_signal(signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert received == [signal.SIGUSR1, signal.SIGTERM]
    assert (signals.end, signals.save) == (False, False)


def test_handlers_come_back_after_an_error(earlier):
    """Training may end by one."""
    handlers, _ = earlier
    with pytest.raises(KeyError), StopSignals():
        raise KeyError
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def test_a_later_exit_does_not_install_the_handlers_of_an_earlier_block_again(earlier):
    """Such as those of a training in a thread, which has none."""
    signals = StopSignals()
    with signals:
        pass
    block_handlers = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    signals.__exit__()
    assert {signal.getsignal(number) for number in SIGNALS} == {signal.SIG_IGN}
    for number, handler in block_handlers.items():
        signal.signal(number, handler)


def test_other_threads_leave_signals_alone(earlier):
    """Python refuses handlers there."""
    handlers, _ = earlier
    thread_handlers = []

    def run():
        with StopSignals():
            thread_handlers.append({number: signal.getsignal(number) for number in SIGNALS})

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert thread_handlers == [handlers]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_signals_that_were_ignored_or_left_to_the_system_are_so_again(earlier, handler):
    """Such as those of a program that runs under nohup."""
    for number in SIGNALS:
        signal.signal(number, handler)
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        assert signals.save
    assert {signal.getsignal(number) for number in SIGNALS} == {handler}


def test_a_handler_that_python_cannot_restore_stays(earlier, monkeypatch):
    """It is None to Python, which cannot install it again."""
    handlers, received = earlier
    getsignal = signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda n: None if n == signal.SIGTERM else getsignal(n)
    )
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert (signals.end, signals.save) == (False, True)
    assert received == [signal.SIGTERM]
    assert getsignal(signal.SIGUSR1) == handlers[signal.SIGUSR1]
