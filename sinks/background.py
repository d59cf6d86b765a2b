"""Work that goes on beside the generation: one thread, a short queue, and no error that is lost."""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, Full, Queue
from threading import Event, Thread
from types import TracebackType
from typing import Generic, TypeVar

Item = TypeVar("Item")

_LOOK = 0.1  # seconds between two looks whether the other side has given up


class Background(Generic[Item]):
    """Calls ``work`` with every item that was put, in order, in a thread of its own.

    An error in ``work`` is raised by the next :meth:`put`, or when the ``with`` block ends. An error inside the block
    drops what still waits.

    Args:
        work: called in the thread.
        waiting: how many items may wait; a further :meth:`put` waits itself, so that memory stays bounded.
    """

    def __init__(self, work: Callable[[Item], None], waiting: int) -> None:
        self._work = work
        self._queue: Queue[Item | None] = Queue(waiting)
        self._dropped = Event()
        self._error: BaseException | None = None
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> Background[Item]:
        self._thread.start()
        return self

    def put(self, item: Item) -> None:
        self._put(item)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._dropped.set()
        else:
            self._put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _put(self, item: Item | None) -> None:
        while True:
            if self._error is not None:
                raise self._error
            try:
                return self._queue.put(item, timeout=_LOOK)
            except Full:
                continue

    def _run(self) -> None:
        while not self._dropped.is_set():
            try:
                item = self._queue.get(timeout=_LOOK)
            except Empty:
                continue
            if item is None:
                return
            try:
                self._work(item)
            except BaseException as error:  # whatever it is, it belongs to the thread that puts
                self._error = error
                return
