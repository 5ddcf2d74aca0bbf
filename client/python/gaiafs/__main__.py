"""The command: ``python -m gaiafs``."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from . import Error, FormatError, __version__, info, warm
from .arguments import ordinal_of


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
