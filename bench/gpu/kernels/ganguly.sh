#!/bin/bash
# Runs Ganguly's kernels on cuda:0 with less and less device memory, eight programs at once, unequal tenants, urgent
# acquires next to seven programs that keep the link busy, and two models in turn.
#
#   GAIAFS=./gaiafs LIBRARY=./libgaiafs.a INCLUDE=DIR ganguly.sh FOLDER PART...
#
# PARTs are kernels, managed, eight, tenants, transfers and models; without PARTs, all of them. FOLDER needs 22 GiB of
# free space, best in memory (/dev/shm). Needs nvcc; models needs PyTorch and transformers, and PYTHONPATH with gaiafs.
# With GPUS=emulated:1 everything runs on the CPU, for a trial. moves.sh runs all of it in six minutes, with smaller
# sizes, and prints a table.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 mib=${MIB:-512} gpus=${GPUS:-cuda:0}
shift
work=$(mktemp -d "$folder/gaiafs-ganguly.XXXXXX")
trap '"$GAIAFS" umount "$work/m" 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/s" "$work/m" "$work/sums"
PATH=$PATH:/usr/local/cuda/bin
# With BUILT=FOLDER the programs are taken from there; part build puts them there.
if [ -x "${BUILT:-}/ganguly" ]; then
	cp "$BUILT"/{cpu,ganguly,transfers} "$work" || exit
else
	g++ -O2 -ffp-contract=off -std=c++17 -I"$INCLUDE" -o "$work/cpu" -x c++ "$here/ganguly.cu" -x none "$LIBRARY" \
		-ldl -lpthread || exit
	if [[ $gpus = emulated* ]]; then
		cp "$work/cpu" "$work/ganguly"
	elif [[ $# -ne 1 || ! $1 =~ ^(transfers|models)$ ]]; then
		nvcc -O2 -std=c++17 -arch=native -fmad=false --extended-lambda -I"$INCLUDE" -o "$work/ganguly" \
			"$here/ganguly.cu" "$LIBRARY" -ldl -lpthread &
		compiler=$!
	fi
	gcc -std=c11 -O2 -I"$INCLUDE" -o "$work/transfers" "$here/transfers.c" "$LIBRARY" -ldl -lpthread || exit
fi
kernels="bfs sssp nw ra backprop fdtd hotspot srad"
sums() { # KERNEL MIB: what the CPU makes of it
	[ -e "$work/sums/$1.$2" ] || "$work/cpu" "$1" "$2" copy whole - "$work/sums" >/dev/null
}
mount() { "$GAIAFS" mount --daemon --gpus "$gpus" --log-level warn "$@" "$work/s" "$work/m" >/dev/null; }
umount() { "$GAIAFS" umount "$work/m" || echo "umount failed"; }
run() { timeout 60 "$work/ganguly" "$1" "$2" "$3" "$4" "$work/m/$1.$BASHPID" "$work/sums" || echo "FAILED: $*"; }

kernels() {
	local kernel percent way rule
	for kernel in $kernels; do sums "$kernel" "$mib" & done
	wait
	[[ $gpus = emulated* ]] || for way in "copy whole" "copy tiled" "pinned whole" "managed whole"; do
		run all "$mib" $way | sed 's/^/-        /'
	done
	for percent in ${PERCENTS:-110 80 50 25}; do
		for rule in ${RULES:-lru}; do
			for way in ${WAYS:-whole tiled}; do
				brackets "$percent" "$rule" "$way" $((4 * mib))M "$percent% $rule"
			done
		done
		# Without pinned memory everything that a bracket uses moves in. Brackets of tiles still fit.
		[[ -z ${MIGRATE:-} || $percent -ge 100 ]] || brackets "$percent" lru tiled 0 "$percent% migrate"
	done
	# By the threshold, what few brackets use stays in pinned memory. THRESHOLD has the shares of memory to run this with.
	for percent in ${THRESHOLD:-}; do
		brackets "$percent" lru tiled $((4 * mib))M "$percent% threshold" --placement threshold
	done
}
brackets() { # PERCENT RULE WAY PINNED LABEL FLAG...
	local percent=$1 rule=$2 way=$3 pinned=$4 label=$5
	shift 5
	mount --gpu-memory $((mib * percent / 100))M --pinned-memory "$pinned" --eviction "$rule" "$@" || return
	run all "$mib" movable "$way" | sed "s/^/$label /"
	umount
}

build() { cp "$work"/{cpu,ganguly,transfers} "$BUILT"; }

# managed memory in what a ballast leaves free, as the driver moves it
managed() {
	local kernel
	for kernel in $kernels; do sums "$kernel" "$mib" & done
	wait
	KEEP=$((mib * 80 / 100 << 20)) run all "$mib" managed whole | sed 's/^/80% driver /'
}

# together PROGRAMS COMMAND...: waits until all have filled their memory, and prints how long their work takes
together() {
	local n=$1 i
	shift
	rm -f "$work"/gate*
	for ((i = 0; i < n; i++)); do GATE=$work/gate "$@" >"$work/out.$i" & done
	for ((i = 0; i < 600; i++)); do
		[ "$(ls "$work"/gate.* 2>/dev/null | wc -l)" -ge "$n" ] && break
		[ "$(jobs -rp | wc -l)" -lt "$n" ] && break # one has failed
		sleep 0.1
	done
	touch "$work/gate"
	wait
	cat "$work"/out.* | awk '
		{ if (!n || $(NF-2) < b) b = $(NF-2); if ($(NF-1) > e) e = $(NF-1); bad += $NF != "right"; n++ }
		END { printf "%d programs %.3f s%s\n", n, e - b, bad ? " WRONG" : "" }'
	rm -f "$work"/out.* "$work"/gate*
}

eight() {
	local budget=${BUDGET:-1024} size pause n part kernel=${KERNEL:-hotspot} placement
	for part in ${PARTS:-1 4}; do
		sums "$kernel" "$((part == 1 ? budget * 21 / 64 : budget * 3 / 4))" &
	done
	wait
	for pause in ${PAUSES:-0 3000}; do
		for part in ${PARTS:-1 4}; do
			size=$((part == 1 ? budget * 21 / 64 : budget * 3 / 4))
			for placement in ${PLACEMENTS:-eager}; do
				for n in 1 8; do
					mount --gpu-memory $((budget / part))M --pinned-memory $((8 * budget))M --eviction lru \
						--placement "$placement" || return
					echo -n "memory $((budget / part)) MiB, each maps $size MiB, pause $pause us, $placement: "
					PAUSE=$pause together $n run "$kernel" "$size" movable tiled
					umount
				done
			done
		done
	done
}

tenants() {
	local budget=${BUDGET:-1024} name
	for name in "one 1" "two 2" "five 5"; do
		printf '[[tenant]]\nname = "%s"\nusers = ["*"]\nweight = %s\n' $name
	done >"$work/tenants.toml"
	sums srad $budget
	mount --gpu-memory ${budget}M --pinned-memory $((4 * budget))M --eviction lru --tenants "$work/tenants.toml" || return
	rm -f "$work"/gate*
	for name in one two five; do
		GATE=$work/gate GAIAFS_TENANT=$name run srad $budget movable tiled >"$work/out.$name" &
	done
	python3 - "$work" "$GAIAFS" <<'PYTHON'
import glob, json, os, subprocess, sys, time
work, gaiafs = sys.argv[1:]
def running():
    return [p for p in glob.glob(work + "/gate.*") if os.path.exists("/proc/" + p.rsplit(".", 1)[1])]
deadline = time.time() + 60
while len(glob.glob(work + "/gate.*")) < 3 and time.time() < deadline:
    time.sleep(0.05)
open(work + "/gate", "w").close()
seen, begin = [], time.time()
while time.time() - begin < float(os.environ.get("LOOK", "20")):
    shown = subprocess.run([gaiafs, "status", "--json", work + "/m"], capture_output=True, check=True).stdout
    if any(os.path.getsize(work + "/out." + n) for n in ("one", "two", "five")):
        break
    tenants = json.loads(shown)["devices"][0]["tenants"]
    of = [(t["tenant"].split()[-1], t["bytes"] / t["share_bytes"]) for t in tenants if "named" in t["tenant"]]
    if len(of) == 3 and time.time() - begin > 0.3:
        seen.append((sum(x for _, x in of) ** 2 / (3 * sum(x * x for _, x in of)), of))
if seen:
    indices, last = [j for j, _ in seen], ", ".join("%s %.2f" % x for x in seen[-1][1])
    print("Jain's index of what tenants own by their shares, %d looks: mean %.3f, least %.3f; last %s" % (
        len(seen), sum(indices) / len(seen), min(indices), last))
else:
    print("tenants: never all three")
PYTHON
	wait
	cat "$work"/out.*
	umount
}

transfers() {
	# Each of the seven has a file of its own, so that none waits for another. The files are pinned on the host, so that
	# they wait for the link, not for the cores that copy. The device has memory for all of them, so nothing is evicted.
	# To read them all ahead takes longer than a round of acquires.
	local discipline i all=${LINK_MIB:-21504} n=${ACQUIRES:-32} beside
	mount --gpu-memory $((all + 1024))M --pinned-memory $((all + 1024))M || return
	for ((i = 0; i < 7; i++)); do "$work/transfers" make "$work/s/big.$i" $((all / 7)) & done
	wait
	"$work/transfers" make "$work/s/urgent" $((2 * n)) || return
	"$GAIAFS" pin --device host "$work"/m/big.* >/dev/null || return
	for discipline in alone ${DISCIPLINES:-fcfs priority preemptive preemptive-exclusive shares}; do
		beside=("$work"/m/big.*)
		if [ "$discipline" = alone ]; then beside=(); else "$GAIAFS" set "$work/m" transfers="$discipline" >/dev/null; fi
		echo -n "$discipline: "
		timeout 60 "$work/transfers" urgent "${TIMES:-6}" "$n" "$work/m/urgent" "${beside[@]}"
	done
	umount
	rm -f "$work"/s/{big.*,urgent}
}

models() {
	mount --gpu-memory ${MODELS_MEMORY:-1536M} --pinned-memory 4G --eviction lru || return
	timeout 120 ${PYTHON:-python3} "$here/two_models.py" "$work/s" "$work/m" --device ${gpus/emulated:1/emulated:0} \
		${MODELS:-} || echo "models FAILED"
	umount
}

[ $# -gt 0 ] || set -- kernels managed eight tenants transfers models
for part; do
	if [ "$part" = kernels ] && [ -n "${compiler:-}" ]; then wait $compiler || exit; compiler=; fi
	[[ -z ${compiler:-} || $part = transfers || $part = models ]] || { wait $compiler || exit; compiler=; }
	SECONDS=0
	"$part"
	echo "($part took $SECONDS s)"
done
