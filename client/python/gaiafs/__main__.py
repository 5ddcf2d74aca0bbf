"""The command: ``python -m gaiafs``."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import json
import os
import runpy
import sys
import time

from . import Error, FormatError, __version__, info, patch, warm
from .arguments import device_of


def _progress(file: str, done: int, size: int) -> None:
    print(f"\r{file}: {done >> 20} of {size >> 20} MiB", end="" if done < size else "\n", file=sys.stderr, flush=True)


def _rewrites() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _device(text: str) -> str:
    try:
        device_of(0 if text == "all" else text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    except Error:
        pass  # a valid name of a device that does not exist: the call reports that
    return text


def _warm(arguments: argparse.Namespace) -> None:
    for path in arguments.path:
        for device in _devices(path) if arguments.device == "all" else [arguments.device]:
            begin = time.monotonic()
            n = warm(path, device, None if arguments.quiet or not _rewrites() else _progress)
            print(f"{path}: {n} bytes on device {device} in {time.monotonic() - begin:.2f} s")


def _devices(path: str) -> list[str]:
    """Returns the devices of a path's mount that this process can name: GPUs as it counts them."""
    of_mount = info(path)["devices"]
    numbers = [d["device"] for d in of_mount if d["kind"] == "emulated"]
    if len(numbers) == len(of_mount):
        return [f"emulated:{n}" for n in numbers] or ["0"]
    return [f"cuda:{n}" for n in range(len(of_mount) - len(numbers))]


def _info(arguments: argparse.Namespace) -> None:
    print(json.dumps(info(arguments.path), indent=2), flush=True)


def _check(arguments: argparse.Namespace) -> None:
    script = arguments.script
    if not arguments.module:
        if not os.path.isfile(script):
            raise Error(errno.EISDIR if os.path.isdir(script) else errno.ENOENT, "", script)
        return
    sys.path[0] = os.getcwd()
    try:
        known = importlib.util.find_spec(script) is not None
    except (ImportError, ValueError):
        known = False
    if not known:
        raise Error(errno.ENOENT, f"there is no module {script}")


def _program(arguments: argparse.Namespace) -> None:
    """Runs a program as ``python`` does, patched. Its exceptions are not caught."""
    patch(report=arguments.report)
    script = arguments.script
    sys.argv[:] = [script, *arguments.arguments]
    if arguments.module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gaiafs", description="Files of a gaiafs mount in the memory of GPUs.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    w = commands.add_parser(
        "warm",
        help="load files into a device's memory, so that programs that map them later find them there",
        description="Loads files, or the *.safetensors of directories and indexes, into the memory of devices. If a "
        "directory has none itself, they are those below it. The mount keeps them there until it needs the memory.",
    )
    w.add_argument("path", nargs="+", metavar="PATH", help="file, directory or index on a mount")
    words = "number as this process counts, cuda:N, or all (default: %(default)s)"
    w.add_argument("--device", default="all", type=_device, help=words)
    w.add_argument("--quiet", action="store_true", help="show no progress")
    w.set_defaults(run=_warm)
    i = commands.add_parser(
        "info",
        help="print as JSON what files contain and which devices have them",
        description="Prints as JSON what a file, the *.safetensors of a directory, an index or a mountpoint contains, "
        "and what devices have of it.",
    )
    i.add_argument("path", metavar="PATH", help="file, directory, index or mountpoint")
    i.set_defaults(run=_info)
    r = commands.add_parser(
        "run",
        help="run a Python program, unchanged, on shared weights",
        description="Runs a Python program. When it loads files of a mount with safetensors or transformers, it gets "
        "tensors in shared memory (gaiafs.patch). The tensors are read-only: a program that trains must load copies.",
    )
    r.add_argument("--report", action="store_true", help="say at the end which files were shared, which were not, and why")
    r.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    r.add_argument("script", metavar="SCRIPT", help="file with the program")
    r.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the program's own arguments")
    r.set_defaults(run=_check, then=_program)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (Error, FormatError, ValueError) as e:
        print(f"gaiafs: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the output has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    if hasattr(arguments, "then"):
        arguments.then(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
