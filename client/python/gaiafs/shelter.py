"""Runs work that no interrupt cuts short, and gives back what an interrupt leaves behind.

Python runs signal handlers, such as KeyboardInterrupt's, in the main thread only, between any two byte codes. Work that
must not end at an arbitrary line runs in a thread of its own (``run``): opening files, mapping and unmapping, where
starting a thread costs little in comparison. For acquire and release it would cost too much, so these are written so
that they may end anywhere. The threads do not stay, for the sake of programs that fork: Python 3.12 and later warn of a
fork while the process has another thread.

The result of such work is an object that owns what was made. When an interrupt ends the caller before it has the
result, the object goes, and its end gives everything back (``at_end``). The end runs no Python code: an interrupt would
cut that short, and Python ignores exceptions in finalizers, so Ctrl-C would be lost.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar

from . import silence
from .errors import raise_first

_P = ParamSpec("_P")
_T = TypeVar("_T")

# These would interrupt a thread that waits in the C library, and only the main thread handles them.
_SIGNALS = signal.valid_signals() - {signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGSEGV}
_SIDE_BY_SIDE = 8  # how many works together runs concurrently
# seconds that one wait lasts. A signal ends it at once, unless it comes just before the wait in the kernel.
_PIECE = 0.1
_LONGEST_END = 0.05  # how many seconds to wait for a thread that has nothing left to do

# close closes a descriptor and raises nothing. Linux closes it even if it reports an error, as it does for a file of a
# dead mount. os.close would raise that, in place of what went wrong before, and leave further descriptors open.
close = ctypes.CDLL(None).close
close.argtypes = (ctypes.c_int,)
unlink = ctypes.CDLL(None).unlink  # it raises nothing either
unlink.argtypes = (ctypes.c_char_p,)


_abandoned: list[weakref.ref[_Job[Any]]] = []
_ends: dict[weakref.ref[Any], weakref.ref[Any]] = {}
atexit.register(_ends.clear)  # the end of a process frees everything, and CUDA may be gone by then


def at_end(owner: object, steps: Iterator[object]) -> None:
    """Takes the next of steps when owner is collected. steps are calls of C functions, chained by ``map`` and the like.

    So no interrupt comes between them, and none is lost in them. After the last step nothing more happens: a caller who
    takes a step, or what it is made of, ends the thing instead.
    """
    end = weakref.ref(owner, functools.partial(next, steps))  # the reference is next's default, which nobody sees
    _ends[weakref.ref(owner, _ends.pop)] = end  # keeps both references until then


def run(work: Callable[[], _T]) -> _T:
    """Returns what work returns, or raises what it raises.

    An interrupt ends this call at once, but not the work. The work runs to its end, and its result is dropped: it must
    be of no value, or an object that gives back what it owns. If no thread can be started, the work runs in the main
    thread, and an interrupt may end it anywhere. That happens while the interpreter finalizes, and if the process may
    have no more threads (ulimit -u).
    """
    if _thread.get_ident() != threading.main_thread().ident:
        old = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            return work()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
    if sys.is_finalizing():  # a thread would end at its first line of Python, and this would wait for ever
        return work()
    job = _Job(work)
    begun: list[int] = []
    try:
        try:
            begun.extend(map(_thread.start_new_thread, (job.run,), ((),)))
        except RuntimeError:  # no more threads are allowed
            return work()
        job.wait()
        raise_first(job.failures)
        return job.results.pop()
    except BaseException:  # after an interrupt, its traceback has the job, maybe for long: see sys.last_exc
        job.wanted.clear()
        job.results.clear()
        if begun and not job.done:
            _abandoned.append(weakref.ref(job))
        raise


def wait_for_abandoned() -> None:
    """Waits until the works have ended whose callers were interrupted, and their results are gone."""
    for reference in _abandoned[:]:
        if (job := reference()) is not None:
            job.wait()
        with contextlib.suppress(ValueError):
            _abandoned.remove(reference)


def sheltered(work: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function that runs work with run."""

    @functools.wraps(work)
    def call(*arguments: _P.args, **options: _P.kwargs) -> _T:
        return run(functools.partial(work, *arguments, **options))

    return call


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
    """Closes descriptors. Errors are ignored: see close. For run."""
    while fds:
        close(fds.pop())


class _Job(Generic[_T]):
    """Work in a thread."""

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work = work
        self.results: list[_T] = []
        self.failures: list[BaseException] = []
        self.ended: SimpleQueue[None] = SimpleQueue()
        self.wanted = [True]  # empty once an interrupt has ended the caller
        self.done = False

    def run(self) -> None:
        self._thread = _thread.get_native_id()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.results.append(self._work())
        except BaseException as e:
            self.failures.append(e)
        del self._work
        if not self.wanted:
            self.results.clear()
        self.done = True
        self.ended.put(None)

    def wait(self) -> None:
        watch = None
        while not self.done:
            try:
                self.ended.get(timeout=_PIECE)
            except Empty:
                watch = watch or silence.Watch()
                watch.look()
        self.wait_for_thread()

    def wait_for_thread(self) -> None:
        if _thread._count() <= 1:  # with more threads, getting the interpreter's lock back may take long
            _wait_for(self._thread)
