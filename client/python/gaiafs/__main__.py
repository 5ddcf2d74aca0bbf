"""The command: ``python -m gaiafs``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from . import Error, FormatError, __version__, align, info, warm
from .mapping import ordinal_of


def _progress(file: str, done: int, size: int) -> None:
    print(f"\r{file}: {done >> 20} of {size >> 20} MiB", end="" if done < size else "\n", file=sys.stderr, flush=True)


def _device(text: str) -> str:
    try:
        ordinal_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    except Error:
        pass  # a device all right, but none that there is: the call says so
    return text


def _warm(arguments: argparse.Namespace) -> None:
    for path in arguments.path:
        begin = time.monotonic()
        n = warm(path, arguments.device, None if arguments.quiet or not sys.stderr.isatty() else _progress)
        print(f"{path}: {n} bytes on device {arguments.device} in {time.monotonic() - begin:.2f} s")


def _info(arguments: argparse.Namespace) -> None:
    print(json.dumps(info(arguments.path), indent=2), flush=True)


def _align(arguments: argparse.Namespace) -> None:
    try:
        left = align(arguments.source, arguments.target)
    except FileExistsError:
        raise ValueError(f"{arguments.target} exists: remove it, or name another file to write") from None
    except OSError as e:
        raise ValueError(e) from None
    if left:
        print(f"{arguments.target}: {left} tensors are not aligned, since sizes before them are no multiples of 16 bytes")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gaiafs", description="Files of a gaiafs mount in the memory of GPUs.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    w = commands.add_parser(
        "warm",
        help="load files into a device's memory, so that programs that map them later find them there",
        description="Loads files, or the *.safetensors of directories and indexes, into a device's memory. The mount keeps "
        "them there until it needs the room.",
    )
    w.add_argument("path", nargs="+", metavar="PATH", help="file, directory or index on a mount")
    w.add_argument("--device", default="0", type=_device, help="number as this process counts, or cuda:N (default: %(default)s)")
    w.add_argument("--quiet", action="store_true", help="show no progress")
    w.set_defaults(run=_warm)
    i = commands.add_parser(
        "info",
        help="say in JSON what files hold and which devices have them",
        description="Says in JSON what a file, the *.safetensors of a directory, an index or a mountpoint holds, and what "
        "devices have of it.",
    )
    i.add_argument("path", metavar="PATH", help="file, directory, index or mountpoint")
    i.set_defaults(run=_info)
    a = commands.add_parser(
        "align",
        help="write a safetensors file again with its tensors where kernels need them",
        description="Writes a safetensors file again with its tensors aligned, so that they are shared and need no copies. "
        "Use it when load_safetensors warns that it copied tensors (MisalignedWarning): each process then takes memory and time "
        "for copies of its own. It is done once for each file; names, types, shapes and values stay.",
    )
    a.add_argument("source", metavar="SOURCE", help="safetensors file, anywhere")
    a.add_argument("target", metavar="TARGET", help="file to write, which does not exist")
    a.set_defaults(run=_align)
    arguments = parser.parse_args(argv)
    try:
        arguments.run(arguments)
    except (Error, FormatError, ValueError) as e:
        print(f"gaiafs: {e}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever reads the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
