#!/bin/bash
# Measures memory that moves on cuda:0 in six minutes: Ganguly's kernels, the share that fits and the rules, tenants,
# eight programs, transfers and two models. Prints a table at the end, also of what there was no time for.
#
#   GAIAFS=./gaiafs LIBRARY=./libgaiafs.a INCLUDE=DIR moves.sh FOLDER [PART...]
#
# PARTs are models, transfers, eight, kernels, share and tenants; without PARTs, all of them. The first two run while
# nvcc compiles. FOLDER needs 22 GiB of free space, best in memory (/dev/shm). Needs nvcc; models needs PyTorch and
# transformers, and PYTHONPATH with gaiafs. LOG=FILE keeps the output of the parts. SCALE=2 halves all sizes. After
# TIME=360 seconds it ends what runs, and begins nothing more. With GPUS=emulated:1 everything runs on the CPU, for a
# trial, without share.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 scale=${SCALE:-1} log=${LOG:-} deadline=$((SECONDS + ${TIME:-360}))
shift
[ $# -gt 0 ] || set -- models transfers eight kernels share tenants
BUILT=$(mktemp -d) || exit
trap 'rm -rf "$BUILT"' EXIT
[ -n "$log" ] || log=$BUILT/log
: >"$log"
PATH=$PATH:/usr/local/cuda/bin
(
	export BUILT
	"$here/ganguly.sh" "$folder" build &
	[[ ${GPUS:-} = emulated* ]] || nvcc -O2 -std=c++17 -arch=native -I"$INCLUDE" -o "$BUILT/moving" "$here/moving.cu" \
		"$LIBRARY" -ldl -lpthread
	wait
) >"$BUILT/build.log" 2>&1 &
builder=$!

# limited SECONDS NAME COMMAND... ends the command when its time is over. Mounts are unmounted by its trap.
limited() {
	local limit=$1 name=$2 begin=$SECONDS
	shift 2
	[ $limit -lt $((deadline - SECONDS)) ] || limit=$((deadline - SECONDS))
	[ $limit -gt 5 ] || { echo "part $name: no time left" | tee -a "$log"; return; }
	echo "part $name" | tee -a "$log"
	timeout -k 20 "$limit" "$@" 2>&1 | tee -a "$log"
	[ "${PIPESTATUS[0]}" -ne 124 ] || echo "part $name was not finished in $limit s" | tee -a "$log"
	echo "part $name took $((SECONDS - begin)) s" | tee -a "$log"
}

for part; do
	case $part in
	transfers | models) ;; # these build what they need
	*)
		[ -z "$builder" ] || wait "$builder" || cat "$BUILT/build.log"
		builder=
		export BUILT
		;;
	esac
	case $part in
	eight) # 2.6 times the memory, and three times each; 64 rounds last longer than bringing the memory
		BUDGET=$((512 / scale)) ROUNDS=${ROUNDS:-64} PAUSES=0 PARTS=1 PLACEMENTS="eager threshold" limited 80 eight \
			"$here/ganguly.sh" "$folder" eight
		BUDGET=$((512 / scale)) ROUNDS=4 PAUSES=0 PARTS=4 PLACEMENTS="eager threshold" limited 50 eight-large \
			"$here/ganguly.sh" "$folder" eight
		BUDGET=$((512 / scale)) PAUSES=3000 PARTS=1 PLACEMENTS="eager threshold" limited 50 eight-pauses \
			"$here/ganguly.sh" "$folder" eight
		;;
	kernels) MIB=$((256 / scale)) PERCENTS="110 80 50 25" MIGRATE=1 THRESHOLD="50 25" limited 130 kernels \
		"$here/ganguly.sh" "$folder" kernels ;;
	share)
		[[ ${GPUS:-} = emulated* ]] || MIB=$((1024 / scale)) ACCESSES=192 CHECKS=200 PINNED=4G \
			MEMORY="$((1200 / scale))M=lru $((820 / scale))M=lru $((512 / scale))M=allocated,lru,lfu,random 256M=lru,lfu 32M=lru" \
			limited 90 share "$here/moving.sh" "$folder"
		;;
	transfers) LINK_MIB=$((21504 / scale)) limited 60 transfers "$here/ganguly.sh" "$folder" transfers ;;
	tenants) BUDGET=$((512 / scale)) LOOK=8 limited 35 tenants "$here/ganguly.sh" "$folder" tenants ;;
	models) MODELS="--turns 8 ${MODELS:-}" limited 70 models "$here/ganguly.sh" "$folder" models ;;
	esac
done
python3 "$here/moves.py" "$log"
