"""Connections to daemons that misbehave. The daemon is a thread here, which says what the test wants."""

import contextlib
import errno
import gc
import os
import pathlib
import signal
import socket
import stat
import struct
import threading

import pytest

from gaiafs import connection, wire
from gaiafs.errors import Error

WELCOME = struct.pack("<HHIIIII", 1, 0, 4, 4096, 128, 1, 0)


def reply(type, id, body=b"", flags=0):
    return struct.pack("<IHHQ", 16 + len(body), type, flags, id) + body


def result(id, code=0, text=b"", pages=0):
    return reply(wire.RESULT, id, struct.pack("<IIQ", code, len(text), pages) + text)


class Daemon:
    """Accepts one connection after another and hands each to serve, with the requests after HELLO."""

    def __init__(self, path, serve, welcome=WELCOME):
        self.path, self.accepted, self.failure = str(path), 0, None
        self.serving = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(self.path)
        self.listener.listen()
        self.thread = threading.Thread(target=self.run, args=(serve, welcome))
        self.thread.start()

    def run(self, serve, welcome):
        while True:
            try:
                s, _ = self.listener.accept()
            except OSError:
                return
            self.serving.close()
            self.serving = s
            with s:
                self.accepted += 1
                try:
                    s.recv(4096)
                    if welcome is not None:
                        s.send(reply(wire.WELCOME, 0, welcome))
                    serve(s)
                except OSError:
                    pass
                except Exception as e:
                    self.failure = e

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        try:
            self.serving.shutdown(socket.SHUT_RDWR)  # the client may have it still, in the frames of a failure
        except OSError:
            pass
        self.thread.join()
        self.serving.close()
        self.listener.close()
        assert self.failure is None, self.failure


@pytest.fixture
def start(tmp_path):
    daemons = []

    def start(serve, **options):
        daemons.append(Daemon(tmp_path / f"s{len(daemons)}", serve, **options))
        return daemons[-1]

    yield start
    for d in daemons:
        d.close()


def requests(s):
    while record := s.recv(4096):
        yield wire.decode_header(record)


def answer_all(s):
    for h, _ in requests(s):
        s.send(result(h.id, pages=h.type))


def test_threads_share_a_connection(start):
    def out_of_order(s):
        waiting = []
        for h, _ in requests(s):
            waiting.append(h.id)
            if len(waiting) == 4:
                for id in reversed(waiting):
                    s.send(result(id, pages=id))
                waiting.clear()

    d = start(out_of_order)
    c = connection.open_connection(d.path)
    pages = []
    together = threading.Barrier(8)  # or the last requests would wait for a fourth that never comes

    def ask():
        for _ in range(8):
            together.wait()
            pages.append(c.simple(wire.PING, b""))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(pages) == list(range(1, 65))
    assert d.accepted == 1
    assert connection.open_connection(d.path) is c


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\1",
        reply(wire.RESULT, 1)[:-1],
        reply(wire.RESULT, 99, bytes(16)),
        reply(wire.RESULT, 1, bytes(16)) + b"x",
        reply(0x8777, 99),
        reply(wire.ERROR, 0, bytes(3)),
        reply(wire.ERROR, 0, bytes(16)),
    ],
)
def test_malformed_frames_end_the_connection(start, bad):
    def serve(s):
        s.recv(4096)
        if bad:
            s.send(bad)

    c = connection.open_connection(start(serve).path)
    for _ in range(2):
        with pytest.raises(Error) as e:
            c.simple(wire.PING, b"")
        assert e.value.errno in (errno.EPROTO, errno.ENOTCONN)


def test_lost_connection_ends_for_the_daemon(start):
    """Also while somebody keeps it: or the daemon would keep what the process mapped. And nothing is sent after it."""
    got, queued, ended = [], threading.Event(), threading.Event()
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)

    def serve(s):
        s.send(reply(wire.RESULT, 99, bytes(16)))  # nobody asked
        socket.send_fds(s, [result(1)], [sending])  # comes after it, and must not stay
        os.close(sending)
        queued.set()
        while record := s.recv(4096):
            got.append(record)
        ended.set()

    c = connection.open_connection(start(serve).path)
    assert queued.wait(20)
    for work in (lambda: c.simple(wire.PING, b""), lambda: c.simple(wire.PING, b""), lambda: c.forget(7)):
        with contextlib.suppress(Error):
            work()
    assert ended.wait(20)
    assert len(got) == 1
    assert os.read(receiving, 1) == b""  # the other end of the pipe is closed everywhere
    os.close(receiving)
    assert c.lost is not None and c.lost.errno == errno.EPROTO


def test_replies_that_do_not_fit_fail_the_call_only(start):
    def serve(s):
        for h, _ in requests(s):
            if h.id == 1:
                s.send(reply(wire.DOCUMENT, h.id, b"x"))
            elif h.id == 2:
                s.send(reply(wire.RESULT, h.id, b"short"))
            else:
                s.send(result(h.id))

    c = connection.open_connection(start(serve).path)
    for _ in range(2):
        with pytest.raises(Error) as e:
            c.simple(wire.PING, b"")
        assert e.value.errno == errno.EPROTO
    assert c.simple(wire.PING, b"") == 0


def test_errors_have_the_daemons_words(start):
    def serve(s):
        for h, _ in requests(s):
            s.send(result(h.id, errno.ENOMEM, "no room é".encode()))

    c = connection.open_connection(start(serve).path)
    with pytest.raises(Error, match="no room é") as e:
        c.simple(wire.PING, b"")
    assert e.value.errno == errno.ENOMEM
    assert isinstance(e.value, OSError)


def test_last_words_are_heard_after_a_reset(start):
    def serve(s):
        s.recv(4096)
        s.send(reply(wire.ERROR, 0, struct.pack("<IIQ", errno.EUSERS, 8, 0) + b"too many"))
        s.close()  # with requests unread

    c = connection.open_connection(start(serve).path)
    with pytest.raises(Error, match="too many"):
        c.simple(wire.PING, b"")


@pytest.mark.parametrize(
    "welcome, code",
    [
        (b"", errno.EPROTO),
        (struct.pack("<HHIIIII", 2, 0, 4, 4096, 128, 1, 0), errno.EPROTO),
        (struct.pack("<HHIIIII", 1, 0, 0, 4096, 128, 1, 0), errno.EPROTO),
        (None, errno.ENOTCONN),
    ],
)
def test_handshake_fails_clearly(start, welcome, code):
    d = start(lambda s: None, welcome=welcome)
    with pytest.raises(Error) as e:
        connection.open_connection(d.path)
    assert e.value.errno == code


def test_nobody_listens(tmp_path):
    with pytest.raises(Error, match="does not listen") as e:
        connection.open_connection(str(tmp_path / "none"))
    assert e.value.errno == errno.ECONNREFUSED


def test_forgotten_mappings_are_ended_without_a_wait(start):
    ended, hold = [], threading.Event()

    def serve(s):
        for h, body in requests(s):
            if h.type == wire.UNMAP:
                ended.append(struct.unpack("<Q", body)[0])
            hold.wait()
            s.send(result(h.id))

    c = connection.open_connection(start(serve).path)
    for i in range(40):  # ten times as many as may run at once
        c.forget(i)
    hold.set()
    for _ in range(40):
        c.simple(wire.PING, b"")
    assert sorted(ended) == list(range(40))


def test_forget_in_the_middle_of_a_call(start):
    """As in a finalizer that garbage collection runs while the thread reads."""
    ended = []

    def serve(s):
        for h, body in requests(s):
            if h.type == wire.UNMAP:
                ended.append(struct.unpack("<Q", body)[0])
            s.send(result(h.id))

    c = connection.open_connection(start(serve).path)
    c.call(wire.PING, b"", lambda h, b, fds: c.forget(5))
    c.simple(wire.PING, b"")
    c.simple(wire.PING, b"")
    assert ended == [5]
    assert not c._calls and not c._waiting


def test_interrupted_call_leaves_the_connection_usable(start):
    class Interrupted(Exception):
        pass

    def interrupt(*ignored):
        raise Interrupted

    main = threading.main_thread().ident

    def serve(s):
        first = s.recv(4096)
        signal.pthread_kill(main, signal.SIGUSR1)
        s.recv(4096)
        s.send(result(2, pages=22))
        s.send(result(wire.decode_header(first)[0].id, pages=11))
        answer_all(s)

    old = signal.signal(signal.SIGUSR1, interrupt)
    try:
        c = connection.open_connection(start(serve).path)
        with pytest.raises(Interrupted):
            c.simple(wire.PING, b"")
        assert c.simple(wire.PING, b"") == 22
        assert c.simple(wire.PING, b"") == wire.PING
        assert not c._calls
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_interrupted_calls_leave_room(start, interrupting):
    """Those that went out until their replies came, those that waited for room at once."""
    hold = threading.Event()

    def serve(s):
        for h, _ in requests(s):
            hold.wait()
            s.send(result(h.id, pages=h.type))

    c = connection.open_connection(start(serve).path)
    for _ in range(6):
        with pytest.raises(KeyboardInterrupt), interrupting(0.02):
            c.simple(wire.PING, b"")
    pages = []
    threads = [threading.Thread(target=lambda: pages.append(c.simple(wire.PING, b""))) for _ in range(8)]
    for t in threads:
        t.start()
    with pytest.raises(KeyboardInterrupt), interrupting(0.02):
        c.simple(wire.PING, b"")
    hold.set()
    assert c.simple(wire.PING, b"") == wire.PING
    for t in threads:
        t.join()
    assert pages == [wire.PING] * 8
    c.simple(wire.PING, b"")
    assert not c._calls and not c._waiting


def test_all_who_wait_hear_of_the_end(start):
    def serve(s):
        for _ in range(4):
            s.recv(4096)

    c = connection.open_connection(start(serve).path)
    codes = []

    def ask():
        with pytest.raises(Error) as e:
            c.simple(wire.PING, b"")
        codes.append(e.value.errno)

    threads = [threading.Thread(target=ask) for _ in range(7)]  # more than may run at once
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert codes == [errno.ENOTCONN] * 7


@pytest.mark.parametrize("more", [0, 2])
def test_call_interrupted_in_the_middle_of_its_reply(start, more):
    def serve(s):
        for h, _ in requests(s):
            for i in range(more):
                s.send(reply(wire.DOCUMENT, h.id, bytes([i]), flags=wire.MORE))
            s.send(result(h.id, pages=7))

    def interrupted(*ignored):
        raise KeyboardInterrupt

    c = connection.open_connection(start(serve).path)
    with pytest.raises(KeyboardInterrupt):
        c.call(wire.PING, b"", interrupted)
    assert c.lost is None
    frames = []
    c.call(wire.PING, b"", lambda h, body, fds: frames.append(h.type))
    assert frames == [wire.DOCUMENT] * more + [wire.RESULT]
    assert not c._calls


def test_descriptors_close_on_exec_and_are_not_leaked(start):
    before = len(os.listdir("/proc/self/fd"))
    seen = []

    def serve(s):
        for h, _ in requests(s):
            socket.send_fds(s, [reply(wire.RESULT, h.id, bytes(16))], [0, 0, 0])  # the second time for a call that wants none

    d = start(serve)
    c = connection.open_connection(d.path)
    open_now = len(os.listdir("/proc/self/fd"))
    c.call(wire.PING, b"", lambda h, b, fds: seen.extend((fd, os.get_inheritable(fd)) for fd in fds), descriptors=True)
    c.call(wire.PING, b"", lambda h, b, fds: None)
    assert len(seen) == 3 and not any(inheritable for _, inheritable in seen)
    assert len(os.listdir("/proc/self/fd")) == open_now
    assert before < open_now


def test_child_has_no_socket_of_its_parents(start):
    """Also where a thread was shaking hands: or the daemon would take the child's copy for the parent."""
    asked, go = threading.Event(), threading.Event()

    def slowly(s):
        asked.set()
        go.wait()
        s.send(reply(wire.WELCOME, 0, WELCOME))
        answer_all(s)

    def sockets():
        return sum(os.path.exists(p) and stat.S_ISSOCK(os.stat(p).st_mode) for p in pathlib.Path("/proc/self/fd").iterdir())

    d = start(slowly, welcome=None)
    t = threading.Thread(target=lambda: connection.open_connection(d.path))
    t.start()
    asked.wait()
    before = sockets()
    child = os.fork()
    if child == 0:
        os._exit(before - sockets())
    go.set()
    t.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def test_collected_in_any_order(start):
    c = connection.open_connection(start(answer_all).path)
    s = c._sock
    c.cycle = c  # of what is found at once, whatever is oldest ends first
    gc.collect()
    path = f"/proc/self/fd/{s.fileno()}"
    assert os.path.exists(path)
    del c
    gc.collect()
    del s  # a warning would be an error
    assert not os.path.exists(path)


def test_child_cannot_use_the_connection(start):
    c = connection.open_connection(start(answer_all).path)
    c.simple(wire.PING, b"")
    child = os.fork()
    if child == 0:
        try:
            c.simple(wire.PING, b"")
        except Error as e:
            os._exit(0 if e.errno == errno.ECHILD and not connection._pool else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert c.simple(wire.PING, b"") == wire.PING
