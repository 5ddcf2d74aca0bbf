"""CUDA's driver, loaded when a mount has GPUs: UUIDs of devices, and mapping of memory that the daemon exports.

Ownership: the daemon owns the memory. What is imported here is a right to it, which ends with cuMemUnmap or with the process.
A forked child must not call the driver: ``drop`` belongs to the process that mapped, ``disown`` to its children.

Captures: while any thread captures a CUDA graph, cuCtxSynchronize fails and ends the capture, whichever thread calls it.
Finalizers run at any time and in any thread, so they must not call it. ``drop`` waits with cuMemFree instead, which also waits
for the whole context and, in a thread whose capture mode is relaxed, disturbs no capture.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import errno
import itertools
import operator
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from . import wire
from ._cuda_errors import ERRNO
from .errors import Error, raise_first

LIBRARY = "libcuda.so.1"
GRANULARITY = 2 << 20  # of reserved addresses; where a device asks for more, its extents have it too

_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_READ, _READ_WRITE = 1, 3
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_EXCHANGE = "cuThreadExchangeStreamCaptureMode"
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING

_int, _size, _address, _handle, _pointer = (
    ctypes.c_int,
    ctypes.c_size_t,
    ctypes.c_uint64,
    ctypes.c_uint64,
    ctypes.c_void_p,
)


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("type", _int), ("id", _int), ("flags", _int)]


_to = ctypes.POINTER
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (_to(_int),),
    "cuDeviceGet": (_to(_int), _int),
    "cuDeviceGetUuid": (ctypes.c_char * 16, _int),
    "cuDevicePrimaryCtxRetain": (_to(_pointer), _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxGetCurrent": (_to(_pointer),),
    "cuCtxGetDevice": (_to(_int),),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (_to(_pointer),),
    "cuCtxSynchronize": (),
    "cuStreamCreate": (_to(_pointer), ctypes.c_uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuThreadExchangeStreamCaptureMode": (_to(_int),),
    "cuMemAlloc_v2": (_to(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuMemImportFromShareableHandle": (_to(_handle), _pointer, _int),
    "cuMemAddressReserve": (_to(_address), _size, _size, _address, ctypes.c_ulonglong),
    "cuMemAddressFree": (_address, _size),
    "cuMemMap": (_address, _size, _size, _handle, ctypes.c_ulonglong),
    "cuMemUnmap": (_address, _size),
    "cuMemSetAccess": (_address, _size, _to(_Access), _size),
    "cuMemRelease": (_handle,),
    "cuMemcpyDtoH_v2": (_pointer, _address, _size),
    "cuMemcpyHtoD_v2": (_address, _pointer, _size),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuGetErrorName": (_int, _to(ctypes.c_char_p)),
    "cuGetErrorString": (_int, _to(ctypes.c_char_p)),
}

_T = TypeVar("_T")

_lock = threading.Lock()
_driver: Driver | None = None  # guarded by _lock


def _after_fork_in_child() -> None:
    global _lock, _driver
    _lock = threading.Lock()
    _driver = None  # what it initialised is the parent's


os.register_at_fork(after_in_child=_after_fork_in_child)


def driver() -> Driver:
    """Loads the driver, once. ENODEV where there is none."""
    global _driver
    with _lock:
        if _driver is None:
            _driver = Driver()
        return _driver


class Driver:
    """libcuda.so.1, initialised."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL(LIBRARY)
            self.functions = {name: getattr(library, name) for name in _SIGNATURES}
            uuid = getattr(library, "cuDeviceGetUuid_v2", None)
        except (OSError, AttributeError) as e:
            raise Error(
                errno.ENODEV, f"the mount has GPUs, and {LIBRARY} cannot be loaded ({e}): is NVIDIA's driver installed here?"
            ) from None
        if uuid is not None:
            self.functions["cuDeviceGetUuid"] = uuid
        for name, f in self.functions.items():
            f.argtypes, f.restype = _SIGNATURES[name], _int
        self.functions["cuDeviceGetUuid"].argtypes = (_pointer, _int)
        code = self.functions["cuInit"](0)
        if code:
            hint = ""
            if code == 3:
                hint = "; a forked child cannot use CUDA: start it with multiprocessing's spawn"
            elif "CUDA_VISIBLE_DEVICES" in os.environ:
                hint = f" (CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r})"
            raise Error(errno.ENODEV, f"CUDA cannot be used: cuInit of {LIBRARY}: {self._words(code)}{hint}")

    def call(self, name: str, *arguments: object) -> None:
        self.check(name, self.functions[name](*arguments))

    def check(self, name: str, code: int) -> None:
        if code:
            raise Error(ERRNO.get(code, errno.EIO), f"{name}: {self._words(code)}")

    def _words(self, code: int) -> str:
        words = []
        for name in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self.functions[name](code, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode("ascii", "replace"))
        return ": ".join(words) or f"error {code}"

    def count(self) -> int:
        n = _int()
        self.call("cuDeviceGetCount", ctypes.byref(n))
        return n.value

    def uuid(self, ordinal: int) -> bytes:
        """Returns the UUID of a device by its number in this process. ENODEV where there is none."""
        n = self.count()
        if not 0 <= ordinal < n:
            hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
            why = f"CUDA_VISIBLE_DEVICES is {hidden!r}" if hidden is not None else "CUDA_VISIBLE_DEVICES is not set"
            raise Error(errno.ENODEV, f"there is no CUDA device {ordinal}: {LIBRARY} shows this process {n} ({why})")
        device = _int()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        text = ctypes.create_string_buffer(16)
        self.call("cuDeviceGetUuid", text, device)
        return text.raw

    def ordinal(self, uuid: bytes) -> int:
        """Returns the number of the device with that UUID."""
        for i in range(self.count()):
            if self.uuid(i) == uuid:
                return i
        raise Error(errno.ENODEV, "the daemon's memory is on a GPU that this process cannot see: see CUDA_VISIBLE_DEVICES")

    @contextlib.contextmanager
    def context(self, device: int, keep: Primary) -> Iterator[None]:
        """Has a context of the device current: the caller's if it is one, else the primary one, which keep retains.

        Calls within do not disturb a capture in another thread. Interrupts must not reach it: see shelter.py.
        """
        visit = _Visit(self)
        try:
            visit.enter(device, keep)
            yield
        finally:
            collections.deque(visit.leave, 0)

    def call_in(self, device: int, keep: Primary, *calls: tuple[Any, ...]) -> None:
        """Makes calls with such a context. An interrupt leaves the caller's stack and mode as they were."""
        visit = _Visit(self)
        try:
            visit.enter(device, keep)
            for name, *arguments in calls:
                self.call(name, *arguments)
        finally:
            collections.deque(visit.leave, 0)

    def is_current(self, device: int) -> bool:
        current, its = _pointer(), _int(-1)
        self.call("cuCtxGetCurrent", ctypes.byref(current))
        if current.value:
            self.call("cuCtxGetDevice", ctypes.byref(its))
        return bool(current.value) and its.value == device


class _Visit:
    """What a thread changes for calls on a device. Running ``leave`` changes it back, in one step of C code."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._mode = ctypes.byref(_int(_RELAXED))
        self._relaxed: list[int] = []  # what the calls returned, if they were made
        self._pushed: list[int] = []
        self.leave = itertools.chain(
            _if_done("cuCtxPopCurrent_v2", ctypes.byref(_pointer()), driver, self._pushed),
            _if_done(_EXCHANGE, self._mode, driver, self._relaxed),
        )

    def enter(self, device: int, keep: Primary) -> None:
        functions = self._driver.functions
        self._relaxed.extend(map(functions[_EXCHANGE], (self._mode,)))
        if not self._driver.is_current(device):
            self._pushed.extend(map(functions["cuCtxPushCurrent_v2"], (keep.retain(),)))
            self._driver.check("cuCtxPushCurrent_v2", self._pushed[0])


def _if_done(name: str, argument: object, driver: Driver, codes: list[int]) -> Iterator[object]:
    """Is the call of a function for each code that says success, among those that there are when it is run."""
    once = itertools.compress(itertools.repeat((argument,)), map(operator.not_, codes))
    return itertools.starmap(driver.functions[name], once)


def current() -> int:
    """Returns the context that the calling thread has current; 0 where it has none, or where no mount had GPUs yet."""
    if _driver is None:
        return 0
    context = _pointer()
    _driver.call("cuCtxGetCurrent", ctypes.byref(context))
    return context.value or 0


def within(context: int, work: Callable[[], _T]) -> Callable[[], _T]:
    """Returns work as another thread does it for one that has a context current."""
    if not context:
        return work

    def there() -> _T:
        assert _driver is not None
        _driver.call("cuCtxPushCurrent_v2", context)
        try:
            return work()
        finally:
            _driver.call("cuCtxPopCurrent_v2", ctypes.byref(_pointer()))

    return there


class Primary:
    """The primary context of a device, retained from the first need on until release."""

    def __init__(self, driver: Driver, device: int) -> None:
        self._driver, self._device = driver, device
        self._lock = threading.Lock()
        self._context = _pointer()  # guarded by _lock

    def retain(self) -> ctypes.c_void_p:
        held: list[bool] = []
        try:
            held.extend(map(self._lock.acquire, (True,)))  # not with: see connection.py on interrupts
            if not self._context.value:
                self._driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
            return self._context
        finally:
            for _ in held:
                self._lock.release()

    def release(self) -> None:
        with self._lock:
            if self._context.value:
                self._context = _pointer()
                self._driver.call("cuDevicePrimaryCtxRelease_v2", self._device)


class DeviceMemory:
    """Extents of a CUDA device, side by side at one range of device addresses.

    A handle can only be mapped whole, so that the range may begin before the mapping and end after it. Handles are imported
    as they come, and mapped when the last has come, since only then it is known how many there are.
    """

    def __init__(self, uuid: bytes, offset: int, writable: bool) -> None:
        self._driver = driver()
        self.ordinal = self._driver.ordinal(uuid)
        device = _int()
        self._driver.call("cuDeviceGet", ctypes.byref(device), self.ordinal)
        self._device = device.value
        self._primary = Primary(self._driver, self._device)
        self._offset = offset
        self._access = _READ_WRITE if writable else _READ
        self._handles: list[tuple[int, int]] = []  # imported and not yet mapped, with their sizes
        self._first: int | None = None  # offset in the file of the first extent
        self._base = self._size = self._mapped = 0  # what is reserved, and how much of it is mapped
        self._token = _address()  # a small allocation, which drop frees to wait for the context

    def _current(self) -> contextlib.AbstractContextManager[None]:
        return self._driver.context(self._device, self._primary)

    def add(self, place: wire.Extent, fd: int) -> None:
        """Imports an extent. It does not keep fd."""
        if place.size % GRANULARITY:
            raise Error(errno.EPROTO, f"an extent has {place.size} bytes, no multiple of {GRANULARITY}")
        if self._first is None:
            self._first = place.offset
        handle = _handle()
        with self._current():
            self._driver.call("cuMemImportFromShareableHandle", ctypes.byref(handle), fd, _DESCRIPTOR)
        self._handles.append((handle.value, place.size))

    def finish(self) -> int:
        """Maps what was imported, and returns the address of the mapping's first byte."""
        assert self._first is not None
        size = sum(n for _, n in self._handles)
        base = _address()
        call = self._driver.call
        with self._current():
            self._driver.functions["cuMemAlloc_v2"](ctypes.byref(self._token), 1)  # a full device has none
            call("cuMemAddressReserve", ctypes.byref(base), size, GRANULARITY, 0, 0)
            self._base, self._size = base.value, size
            while self._handles:
                handle, n = self._handles[0]
                call("cuMemMap", self._base + self._mapped, n, 0, handle, 0)
                self._mapped += n
                del self._handles[0]
                call("cuMemRelease", handle)  # the mapping keeps the memory
            access = _Access(_DEVICE, self._device, self._access)
            call("cuMemSetAccess", self._base, size, ctypes.byref(access), 1)
        return self._base + self._offset - self._first

    def settle(self, stream: int | None) -> None:
        """Waits for the kernels and copies that were begun: those of one stream, or all of the device."""
        wait = ("cuCtxSynchronize",) if stream is None else ("cuStreamSynchronize", stream)
        self._driver.call_in(self._device, self._primary, wait)

    def drop(self) -> None:
        """Gives everything back, after the kernels that may use it. The first failure is raised once all was tried."""
        failures: list[Error] = []

        def attempt(name: str, *arguments: object) -> None:
            try:
                self._driver.call(name, *arguments)
            except Error as e:
                failures.append(e)

        handles, self._handles = self._handles, []
        base, mapped, size = self._base, self._mapped, self._size
        token, self._token = self._token, _address()
        self._base = self._mapped = self._size = 0
        try:
            with self._current():
                if mapped:  # cuMemUnmap waits for nobody
                    attempt(*(("cuMemFree_v2", token) if token.value else ("cuCtxSynchronize",)))
                    attempt("cuMemUnmap", base, mapped)
                elif token.value:
                    attempt("cuMemFree_v2", token)
                if size:
                    attempt("cuMemAddressFree", base, size)
                for handle, _ in handles:
                    attempt("cuMemRelease", handle)
            self._primary.release()
        except Error as e:
            failures.append(e)
        raise_first(failures)

    def disown(self) -> None:
        """Forgets everything, in a forked child."""
        self._handles = []
        self._base = self._mapped = self._size = 0
        self._token = _address()

    def read(self, at: int, n: int) -> bytes:
        into = ctypes.create_string_buffer(n)
        self._driver.call_in(self._device, self._primary, ("cuMemcpyDtoH_v2", into, at, n))
        return into.raw

    def write(self, at: int, data: bytes) -> None:
        """Copies data to the device. The bytes are there when it returns, for the daemon and for every stream."""
        # From memory that is not pinned, the copy returns when the bytes are in a buffer of the driver's.
        copy, wait = ("cuMemcpyHtoD_v2", at, data, len(data)), ("cuStreamSynchronize", None)
        self._driver.call_in(self._device, self._primary, copy, wait)


class PrivateMemory:
    """Memory of a device that is this process's alone, filled by copies within the device."""

    def __init__(self, ordinal: int, size: int, moves: list[tuple[int, int, int]]) -> None:
        """Allocates. moves are offsets in the memory, each with the address and the size of what is copied there."""
        self._driver = driver()
        device = _int()
        self._driver.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self._device = device.value
        self._primary = Primary(self._driver, self._device)
        base, call = _address(), self._driver.call
        try:
            with self._driver.context(self._device, self._primary):
                call("cuMemAlloc_v2", ctypes.byref(base), size)
                self.base = base.value
                try:
                    self._fill(moves)
                except BaseException:
                    call("cuMemFree_v2", base)
                    raise
        except BaseException:
            self._primary.release()
            raise

    def _fill(self, moves: list[tuple[int, int, int]]) -> None:
        """Queues all copies, and waits once."""
        stream, call = _pointer(), self._driver.call
        call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            for offset, ptr, n in moves:
                call("cuMemcpyDtoDAsync_v2", self.base + offset, ptr, n, stream)
            call("cuStreamSynchronize", stream)
        finally:
            call("cuStreamDestroy_v2", stream)

    def read(self, at: int, n: int) -> bytes:
        into = ctypes.create_string_buffer(n)
        self._driver.call_in(self._device, self._primary, ("cuMemcpyDtoH_v2", into, at, n))
        return into.raw

    def drop(self) -> None:
        """Frees the memory, after the kernels that may use it."""
        base, self.base = self.base, 0
        if base:
            try:
                with self._driver.context(self._device, self._primary):
                    self._driver.call("cuMemFree_v2", base)
            finally:
                self._primary.release()
