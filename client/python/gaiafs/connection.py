"""The process's connections to daemons: one for each socket, shared by all threads.

There is no thread of the package's own. Of the threads that wait for a reply, one reads for all and passes the task on when
its own reply is complete.

Locks: ``_pool_lock`` or ``Connection._changed``; ``_descriptors`` outside of the latter. Garbage collection may run a
finalizer in the middle of any line that holds one of them, so finalizers never wait for a lock: what they want done they
leave in ``Connection._orphans``, and whoever holds the lock does it.
"""

from __future__ import annotations

import array
import collections
import errno
import itertools
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from . import wire
from .errors import Error, raise_first

# Seconds that a daemon with a full queue of connections, or one that does not answer HELLO, is waited for.
PATIENCE = 30

_E = TypeVar("_E", bound=Exception)
_Received = tuple[bytes, "list[tuple[int, int, bytes]]", int, object]  # what recvmsg returns
Take = Callable[[wire.Header, bytes, "list[int]"], None]

_pool_lock = threading.Lock()
_pool: weakref.WeakValueDictionary[str, Connection] = weakref.WeakValueDictionary()  # guarded by _pool_lock
# Held while descriptors that arrived are neither mapped nor closed, so that a forked child has no copies of them, and while a
# socket is made, so that the child knows of it.
_descriptors = threading.RLock()
_all: weakref.WeakSet[Connection] = weakref.WeakSet()  # also those that are being made; guarded by _descriptors


def _after_fork_in_child() -> None:
    """Closes the child's copies of its parent's sockets, or the parent's end would go unnoticed."""
    global _pool_lock, _pool, _descriptors, _all
    for c in list(_all):
        c.disown()
    _all = weakref.WeakSet()
    _pool = weakref.WeakValueDictionary()
    _pool_lock = threading.Lock()
    _descriptors = threading.RLock()


os.register_at_fork(
    before=lambda: _descriptors.acquire() and None,
    after_in_parent=lambda: _descriptors.release(),
    after_in_child=_after_fork_in_child,
)


class _Socket(socket.socket):
    """A socket that ends with its connection, without a warning where garbage collection comes to it first."""

    def __del__(self) -> None:
        if hasattr(self, "_io_refs"):  # or __init__ was interrupted
            self.close()


class _Call:
    """A request whose reply is awaited."""

    __slots__ = ("take", "error", "done")

    def __init__(self, take: Take) -> None:
        self.take = take
        self.error: Exception | None = None
        self.done = False


def open_connection(path: str) -> Connection:
    """Returns the process's connection to a socket, which it makes where there is none. It lives as long as someone keeps it."""
    with _pool_lock:
        c = _pool.get(path)
        if c is None or c.lost is not None:
            c = Connection(path)
            _pool[path] = c
        return c


class Connection:
    """A connection to one daemon, after the handshake."""

    def __init__(self, path: str) -> None:
        self.lost: Error | None = None  # why the connection is of no use any more; set once
        self._changed = threading.Condition(threading.RLock())  # not Lock: an interrupt could end a wait without it
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # guarded by _changed
        self._reading = False  # a thread reads; guarded by _changed
        self._orphans: collections.deque[int] = collections.deque()  # mappings to end when there is room
        self._pid = os.getpid()
        with _descriptors:
            self._sock = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _all.add(self)
        try:
            self.welcome = self._shake_hands(path)
        except BaseException:
            self._sock.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)

    def disown(self) -> None:
        """Closes a forked child's copy of the socket."""
        self.lost = Error(errno.ECHILD, "the connection belongs to the process that this one was forked from")
        self._sock.close()

    def _shake_hands(self, path: str) -> wire.Welcome:
        s = self._sock
        deadline = time.monotonic() + PATIENCE
        try:
            # With this, unlike with a time-out of Python's, connect waits where the queue of connections is full.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", PATIENCE, 0))
            s.connect(path)
            s.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 0))
        except (FileNotFoundError, ConnectionRefusedError):
            raise Error(errno.ECONNREFUSED, f"gaiafs does not listen on {path}: is it still running?") from None
        except BlockingIOError:
            raise Error(errno.ETIMEDOUT, f"gaiafs does not take connections on {path}") from None
        except OSError as e:
            raise Error(e.errno or errno.EIO, f"no connection to gaiafs at {path}: {e.strerror or e}") from None
        try:
            s.send(wire.frame(wire.HELLO, 0, wire.hello()))
        except (BrokenPipeError, ConnectionResetError):
            pass  # a refusal can still be read
        except OSError as e:
            raise _gone(e) from None
        poll = select.poll()
        poll.register(s, select.POLLIN)
        if not poll.poll(max(0, deadline - time.monotonic()) * 1000):
            raise Error(errno.ETIMEDOUT, "gaiafs does not answer")
        record, fds, _ = self._receive()
        _close(fds)
        try:
            h, body = wire.decode_header(record)
            if h.type == wire.ERROR:
                raise _error_of(body)
            if h.type != wire.WELCOME:
                raise wire.Malformed(f"HELLO was answered with type {h.type:#x}")
            return wire.decode_welcome(body)
        except wire.Malformed as e:
            raise Error(errno.EPROTO, f"the daemon's answer to HELLO is not one that this package knows: {e}") from None

    def call(self, type: int, body: bytes, take: Take, abandoned: Take | None = None) -> None:
        """Sends a request and gives the frames of its reply to take.

        take runs in whichever thread reads, has the descriptors until it returns, and what it raises is raised here once the
        reply is complete. A call that is interrupted (KeyboardInterrupt) ends at once; abandoned gets the frames that are
        still to come. Should the request not have gone out, one call less can run at once from then on.
        """
        if self._pid != os.getpid():
            raise Error(errno.ECHILD, "the connection belongs to the process that this one was forked from")
        c = _Call(take)
        with self._changed:
            self._until(lambda: self.lost is not None or len(self._calls) < self.welcome.max_requests)
            if self.lost is not None:
                raise _again(self.lost)
            id = next(self._ids)
            self._calls[id] = c
        try:
            self._send(wire.frame(type, id, body))
            with self._changed:
                self._until(lambda: c.done)
        except BaseException:
            c.take = abandoned or (lambda h, body, fds: None)
            raise
        finally:
            self._adopt()
        if c.error is not None:
            failures = [c.error]
            c.error = None
            raise_first(failures)

    def simple(self, type: int, body: bytes) -> int:
        """Is call for requests that one RESULT answers. It returns the pages in it."""
        pages = 0

        def take(h: wire.Header, body: bytes, fds: list[int]) -> None:
            nonlocal pages
            if h.type != wire.RESULT:
                raise Error(errno.EPROTO, f"the daemon answered with type {h.type:#x}")
            pages = result(body).pages

        self.call(type, body, take)
        return pages

    def forget(self, mapping: int) -> None:
        """Ends a mapping without waiting: neither for the daemon nor for a lock, so that finalizers may call it."""
        self._orphans.append(mapping)
        self._adopt()

    def _adopt(self) -> None:
        """Sends what forget left. Where somebody holds the lock, the orphan is theirs: they come here afterwards."""
        while self._orphans and not self._owned() and self._changed.acquire(blocking=False):
            try:
                if self.lost is not None or self._pid != os.getpid():
                    return  # the daemon ends the mappings of a connection with it
                if len(self._calls) >= self.welcome.max_requests:
                    return  # whoever completes one of these calls comes here
                try:
                    mapping = self._orphans.popleft()
                except IndexError:
                    return
                id = next(self._ids)
                self._calls[id] = _Call(lambda h, body, fds: None)
                try:
                    self._sock.send(
                        wire.frame(wire.UNMAP, id, wire.unmap(mapping)), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
                    )
                except BlockingIOError:  # the daemon is behind: at the next call
                    del self._calls[id]
                    self._orphans.appendleft(mapping)
                    return
                except OSError as e:
                    self.lost = _gone(e)
            finally:
                self._changed.release()

    def _owned(self) -> bool:
        """Whether this thread holds _changed: a finalizer may run in the middle of what that guards."""
        return bool(self._changed._is_owned())  # type: ignore[attr-defined]

    def _send(self, frame: bytes) -> None:
        """Sends one frame. A record is sent whole or not at all, so that threads need no lock."""
        try:
            self._sock.send(frame, socket.MSG_NOSIGNAL)
        except OSError as e:
            # Whatever fails here, the thread that reads finds out, with the daemon's last words if there are any.
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self.lost = self.lost or _gone(e)

    def _until(self, condition: Callable[[], bool]) -> None:
        """Waits for a condition, with _changed held. It reads, while nobody else does."""
        while not condition():
            if self._reading:  # also where the connection was lost: the reader may be in the middle of a frame
                self._changed.wait(1)  # not for ever: the reader may be interrupted before it says that it has ended
                continue
            if self.lost is not None:
                self._end(self.lost)
                continue
            self._reading = True
            failure: Error | None = None
            interrupt: BaseException | None = None
            try:
                self._changed.release()
                failure = self._read_one()
            finally:
                self._reading = False
                while not self._owned():
                    try:
                        self._changed.acquire()
                    except BaseException as e:  # a signal's; the caller relies on the lock
                        interrupt = e
                if failure is not None:
                    self._end(failure)
                self._changed.notify_all()
            if interrupt is not None:
                raise interrupt

    def _end(self, why: Error) -> None:
        """Ends every call, with _changed held."""
        if self.lost is None:
            self.lost = why
        self.lost = _again(self.lost)
        for c in self._calls.values():
            c.error = c.error or _again(self.lost)
            c.done = True
        self._calls.clear()
        self._changed.notify_all()

    def _read_one(self) -> Error | None:
        """Reads a frame and gives it to its call. What it returns is why the connection is lost."""
        try:
            self._poll.poll()  # the one place where a wait is long; interrupting it loses nothing
        except OSError as e:
            return _gone(e)
        whole, raw = False, list[_Received]()
        fds: list[int] | None = None
        try:
            with _descriptors:
                try:
                    record, fds, truncated = self._receive(socket.MSG_DONTWAIT, raw)
                except BlockingIOError:
                    whole = True
                    return None
                except Error as e:
                    whole = True
                    return e
                try:
                    failure = self._dispatch(record, fds, truncated)
                finally:
                    _close(fds)
            whole = True
            return failure
        finally:
            if not whole and raw and fds is None:
                _close(_descriptors_of(raw[0]))
            if not whole and raw and self.lost is None and not self._cut_short(raw[0][0]):
                self.lost = Error(errno.ENOTCONN, "the connection to gaiafs was interrupted in the middle of a reply")

    def _cut_short(self, record: bytes) -> bool:
        """Fails the call whose frame was interrupted, by Ctrl-C for example, and says whether the connection can go on."""
        try:
            h, body = wire.decode_header(record)
        except wire.Malformed:
            return False
        if h.type == wire.ERROR:
            return False
        c = self._calls.get(h.id)
        if c is not None:
            failure: Error | None = Error(errno.EINTR, "the call was interrupted while its reply arrived")
            try:
                # These can be taken once more. A mapping whose number nobody learnt could not be ended.
                if h.type in (wire.MAPPED, wire.RESULT):
                    c.take(h, body, [])
                if h.type == wire.RESULT:
                    failure = None
            except Error as e:
                failure = e
            except BaseException:
                pass
            if failure is not None:
                c.error = c.error or _again(failure)
            if not h.flags & wire.MORE:
                with self._changed:
                    c.done = True
                    self._calls.pop(h.id, None)
        return True

    def _dispatch(self, record: bytes, fds: list[int], truncated: bool) -> Error | None:
        try:
            h, body = wire.decode_header(record)
            if h.type == wire.ERROR:
                return _error_of(body)
        except wire.Malformed as e:
            return Error(errno.EPROTO, f"the daemon sent a malformed frame: {e}")
        c = self._calls.get(h.id)
        if c is None:
            return Error(errno.EPROTO, "the daemon answered a request that does not run")
        try:
            c.take(h, body, fds)
            if truncated:
                raise Error(errno.EMFILE, "this process has no descriptors left for the extents: see ulimit -n")
        except wire.Malformed as e:
            c.error = c.error or Error(errno.EPROTO, f"the daemon sent a malformed frame: {e}")
        except Exception as e:
            c.error = c.error or _again(e)
        if not h.flags & wire.MORE:
            with self._changed:
                c.done = True
                self._calls.pop(h.id, None)
        return None

    def _receive(self, flags: int = 0, raw: list[_Received] | None = None) -> tuple[bytes, list[int], bool]:
        """Receives a record and the descriptors beside it, which close on exec. raw has them, if this is interrupted."""
        if raw is None:
            raw = []
        space = socket.CMSG_SPACE(4 * wire.MAX_EXTENTS)
        for attempt in itertools.count():
            try:
                # In one step for the interpreter: an interrupt comes before it, or finds what was received in raw.
                raw.extend(map(self._sock.recvmsg, (wire.MAX_FRAME,), (space,), (flags | socket.MSG_CMSG_CLOEXEC,)))
                break
            except BlockingIOError:
                raise
            except ConnectionResetError as e:
                # The daemon closed without reading everything. Its last words come after this error.
                if attempt:
                    raise _gone(e) from None
            except OSError as e:
                raise _gone(e) from None
        record, _, got, _ = raw[0]
        fds = _descriptors_of(raw[0])
        if not record or got & socket.MSG_TRUNC:
            _close(fds)
            if not record:
                raise Error(errno.ENOTCONN, "the connection to gaiafs is lost: the daemon closed it")
            raise Error(errno.EPROTO, "the daemon sent a frame that is too long")
        return record, fds, bool(got & socket.MSG_CTRUNC)


def _descriptors_of(received: _Received) -> list[int]:
    fds = array.array("i")
    for level, kind, data in received[1]:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return list(fds)


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _gone(e: OSError) -> Error:
    return Error(errno.ENOTCONN, f"the connection to gaiafs is lost: {e.strerror or e}")


def _again(e: _E) -> _E:
    """Copies an error that is kept, or that several threads raise: without a traceback, which would keep the connection."""
    return type(e)(e.errno or errno.EIO, e.strerror or "") if isinstance(e, Error) else e


def _error_of(body: bytes) -> Error:
    """Decodes the body of an ERROR, which ends the connection."""
    r = wire.decode_result(body)
    if r.errno == 0:
        return Error(errno.EPROTO, "the daemon sent an error without one")
    return Error(r.errno, r.text)


def result(body: bytes) -> wire.Result:
    """Decodes the body of a RESULT and raises what it says."""
    r = wire.decode_result(body)
    if r.errno:
        raise Error(r.errno, r.text)
    return r
