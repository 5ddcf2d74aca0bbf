"""Puts the C library into wheels. It is compiled from client/c beside this folder, or is the file that GAIAFS_LIBRARY
names.
"""

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NAME = "libgaiafs.so.0"


class WithLibrary(build_py):
    """Puts the library into the package. An editable install has none, and finds the checkout's."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copyfile(self.library(), os.path.join(self.build_lib, "gaiafs", NAME))

    def library(self):
        if "GAIAFS_LIBRARY" in os.environ:
            return os.environ["GAIAFS_LIBRARY"]
        source = pathlib.Path(__file__).resolve().parents[1] / "c"
        if not (source / "gaiafs.h").exists():
            sys.exit(f"{source} is missing: install from a checkout of gaiafs, or set GAIAFS_LIBRARY to the path of {NAME}")
        into = os.path.abspath(self.get_finalized_command("build").build_temp)
        subprocess.run(["make", "-C", source, f"GAIAFS_BUILD={into}"], check=True)  # needs a C compiler
        return os.path.join(into, NAME)


class ForThisMachine(bdist_wheel):
    """Tags the wheel for any Python, for this processor, and for the oldest glibc with the symbols that the library
    needs."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self):
        library = pathlib.Path(self.bdist_dir, "gaiafs", NAME).read_bytes()
        needed = max((int(a), int(b)) for a, b in re.findall(rb"GLIBC_(\d+)\.(\d+)", library))
        return "py3", "none", "manylinux_{}_{}_{}".format(*needed, platform.machine())


class Native(Distribution):
    def has_ext_modules(self):
        return True


setup(distclass=Native, cmdclass={"build_py": WithLibrary, "bdist_wheel": ForThisMachine})
