"""Runs work that no interrupt cuts short.

Python runs signal handlers, such as KeyboardInterrupt's, in the main thread only. Work that must not end at an
arbitrary line runs in a thread of its own. That is mapping and unmapping, where starting a thread costs little in
comparison. For acquire and release it would cost too much, so these are written so that they may end anywhere. The
threads do not stay, for the sake of programs that fork: Python 3.12 and later warn of a fork while the process has
another thread.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Generic, TypeVar

from .errors import raise_first

_T = TypeVar("_T")

# These would interrupt a thread that waits in the C library, and only the main thread handles them.
_SIGNALS = signal.valid_signals() - {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
_SIDE_BY_SIDE = 8  # how many works together runs concurrently
_LONGEST_END = 0.05  # how many seconds to wait for a thread that has nothing left to do

# close closes a descriptor and raises nothing. Linux closes it even if it reports an error, as it does for a file of a
# dead mount. os.close would raise that, in place of what went wrong before, and leave further descriptors open.
close = ctypes.CDLL(None).close
close.argtypes = (ctypes.c_int,)


def run(work: Callable[[], _T], undo: Callable[[_T], None] | None = None) -> _T:
    """Returns what work returns, or raises what it raises.

    An interrupt ends this call at once, but not the work. The work runs to its end, and its result then goes to undo.
    If no thread can be started, the work runs in the main thread, and an interrupt may end it anywhere. That happens
    while the interpreter finalizes, and if the process may have no more threads (ulimit -u).
    """
    if _thread.get_ident() != threading.main_thread().ident:
        old = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return work()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
    if sys.is_finalizing():  # a thread would end at its first line of Python, and this would wait for ever
        return work()
    job = _Job(work, undo)
    begun: list[int] = []
    try:
        try:
            begun.extend(map(_thread.start_new_thread, (job.run,), ((),)))
        except RuntimeError:  # no more threads are allowed
            return work()
        job.ended.get()
        job.wanted.put(True)
        job.wait_for_thread()
    except BaseException:
        job.wanted.put(False)
        job.discard_apart()
        raise
    raise_first(job.failures)
    return job.results.pop()


def together(
    works: Iterable[tuple[Callable[[], _T], bool]], undo: Callable[[_T], None], failures: list[BaseException]
) -> list[_T]:
    """Runs several works, some of them concurrently, and returns their results. It is itself run as the work of run.

    A work may begin before works yields the next one. With each work comes whether there are more.

    If a work or works fails, or somebody else adds to failures, no further work begins. Those that have begun run to
    their end, undo gets their results, and the first failure is raised.
    """
    todo: SimpleQueue[tuple[int, Callable[[], _T]] | None] = SimpleQueue()
    results: dict[int, _T] = {}
    ended: SimpleQueue[int] = SimpleQueue()

    def go_on() -> None:
        while (item := todo.get()) is not None:
            try:
                if not failures:
                    results[item[0]] = item[1]()
            except BaseException as e:
                failures.append(e)
        ended.put(_thread.get_native_id())

    others = 0
    try:
        for i, (work, more) in enumerate(works):
            todo.put((i, work))
            if more and others + 1 < _SIDE_BY_SIDE:
                with contextlib.suppress(RuntimeError):  # no more threads are allowed
                    _thread.start_new_thread(go_on, ())
                    others += 1
            if failures:
                break
    except BaseException as e:
        failures.append(e)
    for _ in range(others + 1):
        todo.put(None)
    go_on()
    mine = _thread.get_native_id()
    for thread in [ended.get() for _ in range(others + 1)]:
        if thread != mine:
            _wait_for(thread)
    if failures:
        for made in results.values():
            try:
                undo(made)
            except Exception:
                pass  # only the first failure is reported
        raise_first(failures)
    return [results[i] for i in range(len(results))]


def _wait_for(thread: int) -> None:
    """Waits until the kernel has removed a thread. A thread that has ended in Python may still be counted for a
    moment.
    """
    task, until = f"/proc/self/task/{thread}", time.monotonic() + _LONGEST_END
    while os.path.exists(task) and time.monotonic() < until:
        os.sched_yield()


def close_all(fds: list[int]) -> None:
    """Closes descriptors in one step, which no interrupt can cut short. Errors are ignored: see close."""
    try:
        deque(map(close, iter(fds.pop, None)), 0)
    except IndexError:
        pass


class _Job(Generic[_T]):
    """Work in a thread. The main thread tells it through ``wanted`` whether the result still matters."""

    def __init__(self, work: Callable[[], _T], undo: Callable[[_T], None] | None) -> None:
        self._work, self._undo = work, undo
        self.results: list[_T] = []
        self.failures: list[BaseException] = []
        self.ended: SimpleQueue[None] = SimpleQueue()
        self.wanted: SimpleQueue[bool] = SimpleQueue()

    def run(self) -> None:
        self._thread = _thread.get_native_id()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.results.append(self._work())
        except BaseException as e:
            self.failures.append(e)
        del self._work
        self.ended.put(None)
        if not self.wanted.get():
            self._discard()

    def _discard(self) -> None:
        try:
            while self._undo is not None:
                self._undo(self.results.pop())
        except Exception:
            pass  # there is no result, or nowhere to report the failure

    def discard_apart(self) -> None:
        """Undoes the result even if the thread was told before that it matters."""
        if self.results and self._undo is not None:
            try:
                _thread.start_new_thread(self._discard, ())
            except RuntimeError:
                pass  # garbage collection will undo it

    def wait_for_thread(self) -> None:
        if _thread._count() <= 1:  # with more threads, getting the interpreter's lock back may take long
            _wait_for(self._thread)
