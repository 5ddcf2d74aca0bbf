"""Maps files of a gaiafs mount into the memory of GPUs, shared with every other program of the machine.

::

    import gaiafs

    weights = gaiafs.load_safetensors("/mnt/data/model.safetensors", device=0)   # PyTorch tensors, shared

    with gaiafs.mmap("/mnt/data/out.bin", device=0, mode="r+") as m:
        with m.acquire():                        # sees what everyone wrote until now
            m.tensor("float32").add_(1)
                                                 # released: from now on every read sees it

The package loads libgaiafs, the C library that talks to the daemon. On a mount with GPUs, that library loads
libcuda.so.1. NumPy, PyTorch and every library that takes DLPack or ``__cuda_array_interface__`` can use the memory.

A process has one connection for each mount; its threads and mappings share it. A forked child makes its own connection.
It cannot use its parent's mappings. If the parent used a GPU, the child cannot use CUDA at all.

When a signal handler raises, as for Ctrl-C, the interrupted call ends at once with that exception. It leaves no lock
held, so other threads and later calls go on. The interrupted work may still be done: the daemon carries out what the
call began, and the package gives back what it would have returned.
"""

from .array import Array
from .brackets import Bracket, explain_faults, use
from .datasets import Dataset
from .dtypes import DType
from .errors import CopiedWarning, Error, FormatError, PastEndWarning, ReadOnlyWarning
from .groups import Group, acquire, atomic
from .mapping import Mapping, mmap
from .memory import Acquired
from .opened import safe_open
from .packs import Pack, pack
from .patching import patch
from .residency import info, status, warm
from .saved import save, save_file
from .shards import ShardPlan, Split
from .views import Segment, View, view
from .weights import Weights, load_file, load_safetensors

__version__ = "0.1.1"

__all__ = [
    "Acquired",
    "Array",
    "Bracket",
    "CopiedWarning",
    "DType",
    "Dataset",
    "Error",
    "FormatError",
    "Group",
    "Mapping",
    "Pack",
    "PastEndWarning",
    "ReadOnlyWarning",
    "Segment",
    "ShardPlan",
    "Split",
    "View",
    "Weights",
    "acquire",
    "atomic",
    "explain_faults",
    "info",
    "load_file",
    "load_safetensors",
    "mmap",
    "pack",
    "patch",
    "safe_open",
    "save",
    "save_file",
    "status",
    "use",
    "view",
    "warm",
]
