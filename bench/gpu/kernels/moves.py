#!/usr/bin/env python3
"""Prints tables of what moves.sh measured, from its log.

moves.py LOG
"""

import collections
import math
import re
import sys

IRREGULAR = ("bfs", "sssp", "nw", "ra")


def kernels(lines: list[str]) -> None:
    """Seconds of each kernel by share of memory and way."""
    took, wrong = collections.defaultdict(dict), 0
    for line in lines:
        m = re.match(r"(-|\d+% \w+) +(\w+) +(movable|copy|pinned|managed) +(whole|tiled) +([\d.]+) s .* (right|WRONG)$", line)
        if m:
            took[m[2]][m[1], m[3], m[4]] = float(m[5])
            wrong += m[6] != "right"
    if not took:
        return
    shares = sorted({k[0].split("%")[0] for of in took.values() for k in of if "%" in k[0]}, key=int, reverse=True)
    print("\nGanguly's kernels, ms: brackets (whole, tiled), with everything moved in (tiled), and with --placement threshold "
          "(tiled), by share of memory")
    print(f"{'':9}{'copy':>8}{'by bus':>9}{'managed':>9}" + "".join(f"{s + ' %: whole':>13}{'tiled':>8}{'moved':>9}{'delayed':>9}" for s in shares))
    gains = collections.defaultdict(list)
    for name, of in took.items():
        cells = [of.get(("-", kind, "whole")) for kind in ("copy", "pinned", "managed")]
        for s in shares:
            rule = next((k[0] for k in of if k[0].startswith(s + "% ") and not k[0].endswith(("migrate", "threshold"))), "")
            ways = [of.get((rule, "movable", "whole")), of.get((rule, "movable", "tiled")),
                    of.get((s + "% migrate", "movable", "tiled")), of.get((s + "% threshold", "movable", "tiled"))]
            cells += ways
            best = min((t for t in ways[:2] if t), default=None)
            for base, other in (("moved", ways[2]), ("bus", cells[1])):
                if best and other:
                    gains[s, base, name in IRREGULAR].append(1 - best / other)
            if ways[1] and ways[3]:
                gains[s, "eager", name in IRREGULAR].append(1 - ways[3] / ways[1])
        print(f"{name:9}" + "".join(
            f"{'-' if c is None else f'{c * 1e3:.1f}':>{(8, 9, 9)[i] if i < 3 else (13, 8, 9, 9)[(i - 3) % 4]}}"
            for i, c in enumerate(cells)))
    for (s, base, irregular), of in sorted(gains.items(), key=lambda g: (-int(g[0][0]), g[0][1:])):
        against = {"moved": "everything moved in", "bus": "by bus always", "eager": "eager placement, tiled"}[base]
        how = " by the threshold" if base == "eager" else ""
        print(f"  {s} %, {'irregular' if irregular else 'regular'}, run time cut{how} against {against}: "
              + " ".join(f"{g:.0%}" for g in of))
    print("  results:", f"{wrong} WRONG" if wrong else "all right")


def share(lines: list[str]) -> None:
    """GB/s of what kernels read, by memory and rule."""
    rows = collections.defaultdict(dict)
    for line in lines:
        m = re.match(r"(-|all|\d\S*) +(\w*) *(movable|mapping|copy|pinned|managed) +(stream|random|skewed) +[\d.]+ s +([\d.]+) GB/s .*wrong (\d+)", line)
        if m:
            rows[f"{m[1]} {m[2]} {m[3]}".strip()][m[4]] = m[5] + ("!" if m[6] != "0" else "")
    if rows:
        print("\nShare that fits, GB/s of what kernels read (1 GiB; memory, rule)")
        print(f"{'':26}{'stream':>10}{'random':>10}{'skewed':>10}")
        for name, of in rows.items():
            print(f"{name:26}" + "".join(f"{of.get(o, '-'):>10}" for o in ("stream", "random", "skewed")))
    for line in lines:
        if line.startswith("check:"):
            print(line)


def eight(lines: list[str]) -> None:
    """Eight programs against one after the other."""
    one, header = {}, False
    for line in lines:
        m = re.match(r"(memory .*): (\d+) programs (-?[\d.]+) s(.*)", line)
        if m and m[2] == "1":
            one[m[1]] = float(m[3])
        elif m:
            if not header:
                print("\nEight programs, throughput against one after the other")
                header = True
            alone, took = one.get(m[1], 0), float(m[3])
            ratio = f"{8 * alone / took:.2f}" if alone > 0 and took > 0 else "-"
            print(f"  {m[1]}: {ratio}  (one {alone:.3f} s, eight {took:.3f} s){m[4]}")


def transfers(lines: list[str]) -> None:
    """Urgent acquires beside the read-ahead of seven."""
    of = {}
    for line in lines:
        if m := re.match(r"([\w-]+): acquire 2 MiB: median (\d+) us, 95 of 100 (\d+) us, longest (\d+) us; "
                         r"read-ahead ([\d.]+) GB/s", line):
            of[m[1]] = [float(x) for x in m.groups()[1:]]
    if not of:
        return
    print("\nAn acquire of 2 MiB beside the read-ahead of seven: median, 95 of 100, longest; read-ahead; against fcfs")
    base = of.get("fcfs")
    for name, (median, high, longest, rest) in of.items():
        line = f"  {name:22}{median:8.0f} us{high:8.0f} us{longest:8.0f} us{rest:9.2f} GB/s"
        if base and name not in ("alone", "fcfs") and median and base[3]:
            line += f"   {base[0] / median:5.1f} times sooner, {rest / base[3]:.2f}"
        print(line)


def geometric(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def models(lines: list[str]) -> None:
    """A turn of each of two models."""
    of = {}
    for line in lines:
        if m := re.match(r"(\w+) +(\d+) forwards per turn: +([\d.]+) ms", line):
            of.setdefault(m[1], []).append(float(m[3]))
    if of:
        print("\nTwo models in turns, ms a turn (1 and 16 forward passes), and times gaiafs's")
        for name, took in of.items():
            ratio = geometric([a / b for a, b in zip(took, of["gaiafs"])]) if "gaiafs" in of else math.nan
            print(f"  {name:9}" + "".join(f"{t:9.1f}" for t in took) + f"{ratio:9.2f}")
    for line in lines:
        if line.startswith(("two models of", "logits differ")):
            print(" ", line)


def main() -> None:
    with open(sys.argv[1]) as log:
        lines = log.read().splitlines()
    print("\n==== what moves.sh measured ====")
    eight(lines)
    kernels(lines)
    share(lines)
    transfers(lines)
    models(lines)
    for line in lines:
        if "Jain" in line or re.search(r"FAILED|too early|not finished|no time left|failed", line):
            print(line)
    print(", ".join(re.sub("^part ", "", line) for line in lines if re.match(r"part \S+ took", line)))


main()
