#!/usr/bin/env python3
"""Breaks down the cost of brackets that brought bytes, from a trace of `gaiafs trace --live --json MOUNTPOINT`.

    swaps.py TRACE...

For each trace it prints the number of brackets, the number that brought bytes, and medians over the latter in
microseconds: the time from the request of the bracket to the daemon's answer; the time in which clients replaced
leaving extents with holes; in which bytes were copied or zeroed; in which the client mapped new extents; and the
remaining time. The trace must be of one program at a time.
"""

import json
import statistics
import sys
from datetime import datetime


def when(text: str) -> float:
    """Returns microseconds."""
    seconds, _, fraction = text.rstrip("Z").partition(".")
    return datetime.fromisoformat(seconds).timestamp() * 1e6 + float((fraction + "000000000")[:9]) / 1e3


def covered(parts: list[tuple[float, float]]) -> float:
    """Returns how long at least one of the parts was in progress."""
    total = end = 0.0
    for a, b in sorted(parts):
        total += max(b - max(a, end), 0)
        end = max(end, b)
    return total


def split(name: str) -> None:
    with open(name) as f:
        events = [json.loads(line) for line in f]
    for e in events:
        e["begin"] = when(e["at"])
        e["end"] = e["begin"] + e.get("took_us", 0)
    uses = [e for e in events if e["kind"] == "use"]
    rows = []
    for u in uses:
        within = [e for e in events if e is not u and e["begin"] >= u["begin"] and e["end"] <= u["end"]]
        copies = [e for e in within if e["kind"] == "transfer"]
        if not copies:
            continue
        moves = [e for e in within if e["kind"] == "move"]
        out = [(e["begin"], e["end"]) for e in moves if e.get("detail") == "to nowhere"]
        back = [(e["begin"], e["end"]) for e in moves if e.get("detail") != "to nowhere"]
        copied = [(e["begin"], e["end"]) for e in copies]
        rows.append({
            "bracket": u["end"] - u["begin"], "taken back": covered(out), "copied": covered(copied),
            "mapped": covered(back), "rest": u["end"] - u["begin"] - covered(out + back + copied),
            "moves": len(moves), "transfers": len(copies),
            "MiB": sum(e.get("bytes", 0) for e in copies if "within" not in e.get("detail", "")) / 2**20,
        })
    print(f"{name}: {len(uses)} brackets, {len(rows)} of them brought bytes")
    for key in rows[0] if rows else ():
        values = sorted(row[key] for row in rows)
        most = values[len(values) * 9 // 10]
        print(f"  {key:12} {statistics.median(values):10.1f}   90th percentile {most:10.1f}")


for trace in sys.argv[1:]:
    split(trace)
