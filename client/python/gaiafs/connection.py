"""The process's connections to daemons: one for each socket, shared by all threads.

There is no thread of the package's own. Of the threads that wait for a reply, one reads for all and passes the task on when
its own reply is complete.

Interrupts: Python runs the handlers of signals in the main thread, between two instructions of Python code, so that a
KeyboardInterrupt may end any line there. A request that is interrupted ends at once, with nothing but that, and holds up
neither other threads nor later requests. For that the main thread holds no lock that a line further down would let go of, and
leaves no step half done that others rely on:

- What may not be torn apart is one call of C code, such as a list that is extended with what a map over other C functions
  yields; no handler runs within. Handlers run after a call, at a jump back and where a function begins, so that nothing comes
  between the begin of an ``except`` or ``finally`` and the first call there. Between ``with`` and its block something does:
  CPython 3.14 looks for signals after it took the lock.
- What an interrupted call leaves, others see by what it recorded (``_Call.sent``, ``_Call.over``), and tidy up.
- What is longer than a request, mapping and unmapping, runs where no handlers run: see shelter.py.

Garbage collection, too, may run a finalizer in the middle of any line. Finalizers leave what they want done in
``Connection._orphans``, and send what goes out without waiting.

Locks, never of the main thread: ``_pool_lock``, or ``Connection.looking``; then ``_descriptors``. ``Connection._turn`` is only
ever tried.
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
from queue import SimpleQueue
from typing import NoReturn, TypeVar, cast

from . import wire
from .errors import Error, raise_first

# Seconds that a daemon with a full queue of connections, or one that does not answer HELLO, is waited for.
PATIENCE = 30

_E = TypeVar("_E", bound=BaseException)
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


class _Call(SimpleQueue["bytes | None"]):
    """A request whose reply is awaited: a queue of the reply's frames. None in between says that it is time to look around."""

    __slots__ = ("id", "take", "sent", "over", "orphans", "error")

    def __init__(self, id: int, take: Take | None = None) -> None:
        self.id = id
        self.take = take  # of a reply with descriptors: only the thread that waits for it reads its frames
        self.sent: list[int] = []  # not empty once the request is on its way, from the very step on that sends it
        self.over = False  # nobody waits any more; set last
        self.orphans: list[int] = []  # the mapping that the request ends, where forget left it
        self.error: BaseException | None = None  # what take raised first


def open_connection(path: str) -> Connection:
    """Returns the process's connection to a socket, which it makes where there is none. It lives as long as someone keeps it."""
    with _pool_lock:
        c = _pool.get(path)
        if c is None or c.lost is not None:
            c = Connection(path)
            _pool[path] = c
        return c


class Connection:
    """A connection to one daemon, after the handshake.

    Invariant: while calls wait, a thread has the turn to read, or is about to try for it, or has a None in its queue. Who gives
    the turn up wakes one that waits (``_pass_on``), and who is interrupted wakes them all.
    """

    def __init__(self, path: str) -> None:
        self.lost: Error | None = None  # why the connection is of no use any more; set once
        self._ids = itertools.count(1)
        self._calls: dict[int, _Call] = {}  # from before the request to the last frame of the reply, in order
        self._waiting: list[_Call] = []  # those of them that a thread waits for, and cut ones that nobody tidied up yet
        self._turn = threading.Lock()  # whoever reads has it
        self._orphans: collections.deque[int] = collections.deque()  # mappings to end when there is room
        self.looking = threading.Lock()  # held for a STATUS, of which a connection may run one; never by the main thread
        self._pid = os.getpid()
        with _descriptors:
            self._sock = _Socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _all.add(self)
        self._sock.setblocking(True)  # whatever socket.setdefaulttimeout says
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
        record = self._receive(wire.MAX_FRAME)
        try:
            h, body = wire.decode_header(record)
            if h.type == wire.ERROR:
                raise _error_of(body)
            if h.type != wire.WELCOME:
                raise wire.Malformed(f"HELLO was answered with type {h.type:#x}")
            return wire.decode_welcome(body)
        except wire.Malformed as e:
            raise Error(errno.EPROTO, f"the daemon's answer to HELLO is not one that this package knows: {e}") from None

    def call(self, type: int, body: bytes, take: Take, descriptors: bool = False) -> None:
        """Sends a request and gives the frames of its reply to take, in this thread.

        What take raises is raised here once the reply is complete. With descriptors take gets those, which are its own until
        it returns; such a call is not for the main thread. A call that is interrupted (KeyboardInterrupt) ends at once,
        and hinders nobody; what is still to come of its reply is dropped.
        """
        if self._pid != os.getpid():
            raise Error(errno.ECHILD, "the connection belongs to the process that this one was forked from")
        c = _Call(next(self._ids), take if descriptors else None)
        # Wakes all that wait when it is run: one step, so that an interrupt finds it done or not begun.
        alarm = map(SimpleQueue.put, self._waiting, itertools.repeat(None))
        try:
            self._waiting.append(c)
            self._calls[c.id] = c
            while not self._has_room(c):
                if not self._read(c) or not c.empty():
                    c.get()
            self._send(c, wire.frame(type, c.id, body))
            self._take_reply(c, take)
            self._waiting.remove(c)
            c.over = True
            self._pass_on(c)
        except BaseException:
            c.over = True
            any(alarm)
            raise
        if self._orphans:
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
        """Sends what forget left, as far as there is room. Whoever completes a call comes here again."""
        while self._orphans and self.lost is None and self._pid == os.getpid():
            c = _Call(next(self._ids))
            try:
                self._waiting.append(c)  # so that the orphan is found if this is cut short
                self._calls[c.id] = c
                if not self._has_room(c):
                    return
                c.orphans.extend(map(collections.deque.popleft, (self._orphans,)))
                frame = wire.frame(wire.UNMAP, c.id, wire.unmap(c.orphans[0]))
                c.sent.extend(map(self._sock.send, (frame,), (socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT,)))
            except (IndexError, BlockingIOError):  # another thread was faster, or the daemon is behind: at the next call
                return
            except OSError:
                self._sock_ends(c)
                return
            finally:
                c.over = True
                self._tidy()

    def _tidy(self) -> None:
        """Takes calls off the lists that were cut short, or that nobody waits for. May itself be cut short anywhere."""
        for c in self._waiting[:]:
            if c.over:
                if not c.sent:
                    try:
                        if c.orphans:
                            self._orphans.extend(map(list.pop, (c.orphans,)))
                    except IndexError:
                        pass  # another thread did
                    if self._calls.pop(c.id, None) is not None:
                        self._tell_of_room()
                if c in self._waiting:
                    try:
                        self._waiting.remove(c)
                    except ValueError:
                        pass  # another thread did

    def _has_room(self, c: _Call) -> bool:
        """Whether a request may go out: it is among the first of those whose reply is not complete."""
        if len(self._waiting) > 1:
            self._tidy()
        n = self.welcome.max_requests
        return len(self._calls) <= n or c.id in [*self._calls][:n]

    def _tell_of_room(self) -> None:
        """Wakes the calls that may go out now, once a call has left."""
        if len(self._calls) >= self.welcome.max_requests:
            for c in self._waiting[:]:
                if not c.sent:
                    c.put(None)

    def _send(self, c: _Call, frame: bytes) -> None:
        """Sends a request. A record is sent whole or not at all, so that threads need no lock."""
        if self.lost is not None:
            raise _again(self.lost)
        try:
            c.sent.extend(map(self._sock.send, (frame,), (socket.MSG_NOSIGNAL,)))
        except OSError:
            self._sock_ends(c)

    def _sock_ends(self, c: _Call) -> None:
        """A send failed. The thread that reads finds out why, with the daemon's last words if there are any."""
        c.sent.append(0)
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the daemon closed it before

    def _take_reply(self, c: _Call, take: Take) -> None:
        """Gives the frames of a reply to take, up to the last."""
        more = True
        while more:
            h, body = self._header(self._next(c))
            if c.take is None:
                try:
                    take(h, body, [])
                except Exception as e:
                    c.error = c.error or _again(e)
            more = bool(h.flags & wire.MORE)

    def _next(self, c: _Call) -> bytes:
        """Waits for a call's next frame. It reads for all, while nobody else does."""
        while True:
            while c.empty() and self._read(c):
                pass
            record = c.get()
            if record is not None:
                self._pass_on(c)
                return record

    def _pass_on(self, c: _Call) -> None:
        """Has another thread read, where one waits and none does."""
        if len(self._waiting) > (not c.over) and not self._turn.locked():
            for other in self._waiting[:]:
                if other is not c and not other.over:
                    other.put(None)
                    return

    def _read(self, c: _Call) -> bool:
        """Reads a frame and delivers it. False says that c has to wait until it is woken."""
        turn: list[bool] = []
        owner: _Call | None = None
        try:
            turn.extend(filter(None, map(self._turn.acquire, (False,))))
            if not turn:
                return False
            if self.lost is not None:
                raise self.lost
            if not c.sent and (self._has_room(c) or not self._poll.poll(50)):
                return True  # what c waits for may have come without a frame
            if c.empty():  # nobody else delivers now
                # The one place where a wait is long. An interrupt loses nothing: the frame stays where it is.
                owner = self._deliver(self._receive(wire.HEADER_SIZE, socket.MSG_PEEK), c)
        except Error as e:
            self._end(e)
        finally:
            for _ in turn:
                self._turn.release()
        if owner is None:
            return True
        owner.put(None)
        return owner.over

    def _deliver(self, head: bytes, c: _Call) -> _Call | None:
        """Receives a frame that begins so, unless it is for another thread to receive: then that one's call is returned."""
        try:
            h = wire.peek_header(head)
            if h.type == wire.ERROR:
                raise _error_of(wire.decode_header(self._receive(wire.MAX_FRAME))[1])
        except wire.Malformed as e:
            raise Error(errno.EPROTO, f"the daemon sent a malformed frame: {e}") from None
        owner = self._calls.get(h.id)
        if owner is None:
            raise Error(errno.EPROTO, "the daemon answered a request that does not run")
        last = () if h.flags & wire.MORE else (h.id,)
        if owner.take is not None and not owner.over:
            if owner is not c:
                return owner
            owner.put(self._receive_descriptors(owner, owner.take))
            for id in last:
                self._calls.pop(id, None)
        else:
            # In one step: received, in the queue of the thread that waits for it, and the call complete.
            delivered = map(owner.put, map(self._sock.recv, (wire.MAX_FRAME,)))
            try:
                collections.deque(itertools.chain(delivered, map(self._calls.pop, last)), 0)
            except OSError as e:
                raise _gone(e) from None
        if last:
            self._tell_of_room()
        return None

    def _receive_descriptors(self, c: _Call, take: Take) -> bytes:
        """Receives a frame with descriptors, which close on exec, and has it taken at once."""
        space = socket.CMSG_SPACE(4 * wire.MAX_EXTENTS)
        with _descriptors:
            try:
                record, beside, got, _ = self._sock.recvmsg(wire.MAX_FRAME, space, socket.MSG_CMSG_CLOEXEC)
            except OSError as e:
                raise _gone(e) from None
            fds = _descriptors_of(beside)
            try:
                h, body = self._header(record)
                take(h, body, fds)
                if got & socket.MSG_CTRUNC:
                    raise Error(errno.EMFILE, "this process has no descriptors left for the extents: see ulimit -n")
            except BaseException as e:
                c.error = c.error or _again(e)
            finally:
                for fd in fds:
                    os.close(fd)
        return record

    def _receive(self, n: int, flags: int = 0) -> bytes:
        """Receives up to n bytes of a record, without the descriptors beside it."""
        for attempt in itertools.count():
            try:
                record = self._sock.recv(n, flags)
                break
            except ConnectionResetError as e:
                # The daemon closed without reading everything. Its last words come after this error.
                if attempt:
                    raise _gone(e) from None
            except OSError as e:
                raise _gone(e) from None
        if not record:
            raise Error(errno.ENOTCONN, "the connection to gaiafs is lost: the daemon closed it")
        return record

    def _header(self, record: bytes) -> tuple[wire.Header, bytes]:
        try:
            return wire.decode_header(record)
        except wire.Malformed as e:
            self._end(Error(errno.EPROTO, f"the daemon sent a malformed frame: {e}"))

    def _end(self, why: Error) -> NoReturn:
        """Ends the connection. The calls that wait find out when they are woken.

        The daemon gets the end of the file, and frees what it had for this process. Closing the socket would do, but another
        thread may be about to use its number; what has arrived, with the descriptors in it, goes now all the same.
        """
        if self.lost is None:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
                while self._sock.recv(1, socket.MSG_DONTWAIT):
                    pass
            except OSError:
                pass  # nothing is left, or the daemon ended it
            self.lost = _again(why)
        raise _again(self.lost) from None


def _descriptors_of(beside: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) // fds.itemsize * fds.itemsize])
    return list(fds)


def _gone(e: OSError) -> Error:
    return Error(errno.ENOTCONN, f"the connection to gaiafs is lost: {e.strerror or e}")


def _again(e: _E) -> _E:
    """Copies an error that is kept, or that several threads raise: without a traceback, which would keep the connection."""
    if isinstance(e, wire.Malformed):
        return cast(_E, Error(errno.EPROTO, f"the daemon sent a malformed frame: {e}"))
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
