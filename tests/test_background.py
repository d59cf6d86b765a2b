"""Work beside the generation: all of it, in order, and no error is lost."""

from __future__ import annotations

import threading

import pytest

from sinks.background import Background


def test_everything_is_done_in_order_before_the_block_ends() -> None:
    done: list[int] = []
    with Background(done.append, waiting=2) as background:
        for number in range(50):
            background.put(number)
    assert done == list(range(50))


def test_no_more_wait_than_may() -> None:
    """One is being worked on, two wait, the fourth has to wait outside."""
    begun, go = threading.Semaphore(0), threading.Event()

    def work(_: int) -> None:
        begun.release()
        assert go.wait(30)

    with Background(work, waiting=2) as background:
        background.put(0)
        assert begun.acquire(timeout=30)
        background.put(1)
        background.put(2)
        fourth = threading.Thread(target=background.put, args=(3,))
        fourth.start()
        fourth.join(0.3)
        assert fourth.is_alive()
        go.set()
        fourth.join(30)
        assert not fourth.is_alive()


def fail(number: int) -> None:
    if number == 3:
        raise OSError("disk full")


def test_an_error_comes_back_to_the_one_who_puts() -> None:
    put: list[int] = []

    def put_until_it_fails() -> None:
        with Background(fail, waiting=1) as background:
            for number in range(1000):
                background.put(number)
                put.append(number)

    with pytest.raises(OSError, match="disk full"):
        put_until_it_fails()
    assert len(put) < 10


def test_an_error_at_the_last_item_is_raised_when_the_block_ends() -> None:
    with pytest.raises(OSError, match="disk full"), Background(fail, waiting=1) as background:
        background.put(3)


def test_an_error_in_the_block_drops_what_waits() -> None:
    done: list[int] = []
    first, go = threading.Event(), threading.Event()

    def work(number: int) -> None:
        first.set()
        assert go.wait(30)
        done.append(number)

    def interrupted() -> None:
        with Background(work, waiting=5) as background:
            for number in range(5):
                background.put(number)
            assert first.wait(30)
            threading.Timer(0.3, go.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert done == [0]
