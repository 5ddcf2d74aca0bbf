"""Loads files into a GPU with safetensors. Orders come on standard input, answers go to standard output, in JSON."""

import sys

# The current folder may have modules with these names, such as this one.
sys.path[:] = [folder for folder in sys.path if folder]

import json
import time

device = "cuda:0"


def carry_out(order):
    global device, torch, safe_open
    if order["Do"] == "open":
        try:
            import torch
            from safetensors import safe_open
        except ImportError as e:
            return {"Err": str(e), "Missing": True}
        if not torch.cuda.is_available():
            return {"Err": "PyTorch finds no GPU", "Missing": True}
        device = "cuda:%d" % order.get("Device", 0)
        torch.zeros(1, device=device)
        torch.cuda.synchronize(device)
        return {}
    # Return the memory of the last load to the driver, so that each load allocates again, as on the other sides.
    torch.cuda.empty_cache()
    start = time.perf_counter_ns()
    with safe_open(order["Path"], framework="pt", device=device) as f:
        tensors = [f.get_tensor(name) for name in f.keys()]
    torch.cuda.synchronize(device)
    took = time.perf_counter_ns() - start
    got = sum(t.numel() for t in tensors)
    if any(t.device.type != "cuda" for t in tensors) or not 0 < order["Size"] - got <= 1 << 20:
        return {"Err": "%d bytes of %d were loaded" % (got, order["Size"])}
    return {"Took": took}


for line in sys.stdin:
    try:
        answer = carry_out(json.loads(line))
    except Exception as e:  # the other process prints it
        answer = {"Err": "%s: %s" % (type(e).__name__, e)}
    print(json.dumps(answer), flush=True)
