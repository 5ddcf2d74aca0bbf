"""Tenants that GAIAFS_TENANT names, on a mount of python_test.go's that has one for this user."""

from __future__ import annotations

import os
import subprocess

import pytest

TENANT = os.environ.get("GAIAFS_TEST_TENANT", "")

pytestmark = pytest.mark.skipif(not TENANT, reason="for a mount with tenants: run the tests with go test ./client/python")

PROGRAM = """
import sys, gaiafs
try:
    with gaiafs.mmap(sys.argv[1]) as m:
        print(m.read(3))
except OSError as e:
    print(e.errno, e)
"""


def test_named(make, python):
    path = make(b"abc")

    def ran(tenant: str) -> str:
        env = {**os.environ, "GAIAFS_TENANT": tenant}
        return subprocess.run([*python, "-c", PROGRAM, path], env=env, check=True, capture_output=True, text=True).stdout

    assert ran(TENANT) == "b'abc'\n"
    assert ran("") == "b'abc'\n"
    assert 'knows no tenant named "nobody"' in ran("nobody")
