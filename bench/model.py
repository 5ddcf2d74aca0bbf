"""Loads a safetensors file and computes with it. It reads orders from standard input and answers on standard output."""

import sys

sys.path[:] = [folder for folder in sys.path if folder]  # the current folder may have modules with these names

import gc
import json
import time
import warnings
import zlib

warnings.simplefilter("ignore")  # PyTorch warns about read-only weights
weights = None


def begin(order):
    """Imports what loading needs. No row counts this time."""
    global gaiafs, numpy, torch, safe_open, framework, device
    try:
        import gaiafs
        from safetensors import safe_open
        if order.get("UUID"):
            import torch
        else:
            import numpy
            with safe_open(order["Path"], framework="np") as f:
                types = {f.get_slice(name).get_dtype() for name in f.keys()}
            if any(t == "BF16" or t[:2] in ("F4", "F6", "F8") for t in types):
                import ml_dtypes  # NumPy has no such types
    except ImportError as e:
        return {"Missing": "%s in %s: install the wheel of gaiafs, safetensors, and torch (without a GPU: numpy and "
                           "ml_dtypes, which gaiafs[numpy] brings), or choose another Python by --python"
                           % (e, sys.executable)}
    if not order.get("UUID"):
        framework, device = "numpy", 0
        return {}
    found = [i for i in range(torch.cuda.device_count())
             if str(torch.cuda.get_device_properties(i).uuid) in order["UUID"]]
    if not found:
        return {"Missing": "PyTorch finds no GPU %s" % order["UUID"]}
    framework, device = "torch", "cuda:%d" % found[0]
    torch.zeros(1, device=device)
    return {}


def wait():
    if framework == "torch":
        torch.cuda.synchronize(device)


def drop(order):
    global weights
    weights = None
    gc.collect()
    if framework == "torch":
        torch.cuda.empty_cache()  # so that each load allocates its memory
    return {}


def load(order):
    """Loads the weights. When the time ends, they are where the program computes with them."""
    global weights
    start = time.perf_counter_ns()
    if order["How"] == "gaiafs":
        weights = gaiafs.load_safetensors(order["Path"], device, framework=framework)
    else:
        short, to = ("pt", device) if framework == "torch" else ("np", "cpu")
        with safe_open(order["Path"], framework=short, device=to) as f:
            weights = {name: f.get_tensor(name) for name in f.keys()}
    wait()
    return {"Took": time.perf_counter_ns() - start}


def step(w):
    """Computes a matrix-vector product for a weight of floats; for other types, adds up the bytes."""
    if framework == "torch":
        if w.is_floating_point() and w.element_size() > 1 and w.dim() > 1 and w.numel():
            return torch.mv(w.reshape(w.shape[0], -1), torch.ones(w[0].numel(), dtype=w.dtype, device=w.device))
        return w.reshape(-1).view(torch.uint8).sum()
    if w.dtype in (numpy.float32, numpy.float64) and w.ndim > 1 and w.size:
        return w.reshape(w.shape[0], -1) @ numpy.ones(w[0].size, w.dtype)
    return numpy.ascontiguousarray(w).reshape(-1).view(numpy.uint8).sum()


def run(order):
    """Returns the shortest of several passes over all weights: for half a second, and at least three."""
    took, all_of_them = [], 0
    while len(took) < 3 or all_of_them < 5e8:
        start = time.perf_counter_ns()
        for w in weights.values():
            step(w)
        wait()
        took.append(time.perf_counter_ns() - start)
        all_of_them += took[-1]
    return {"Took": min(took)}


def checksum(order):
    """Returns a checksum of the names and bytes of all weights."""
    total = 0
    for name in sorted(weights):
        w = weights[name]
        if framework == "torch":
            w = w.reshape(-1).view(torch.uint8).cpu().numpy()
        total = zlib.crc32(w.tobytes(), zlib.crc32(name.encode(), total))
    return {"Sum": total}


orders = {"begin": begin, "drop": drop, "load": load, "run": run, "checksum": checksum}
for line in sys.stdin:
    try:
        order = json.loads(line)
        answer = orders[order["Do"]](order)
    except Exception as e:  # the other process prints it
        answer = {"Err": "%s: %s" % (type(e).__name__, e), "Full": getattr(e, "errno", 0) == 12}
    print(json.dumps(answer), flush=True)
