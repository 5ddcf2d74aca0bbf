#!/bin/bash
# Tests the C library on this machine's GPUs. It builds everything with nvcc, mounts, and runs the examples and the
# scenarios. It prints ok, skip or FAIL for each test and a count, and exits with status 1 if a test failed.
#
#   GAIAFS=build/gaiafs client/c/gputest/run.sh [NAME...]
#
# With names it runs only those. NVCC and NVCC_FLAGS say how to compile. LIMIT is the time limit of a test in seconds
# (120).
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
NVCC=${NVCC:-nvcc}
NVCC_FLAGS=${NVCC_FLAGS:--O2 -std=c++17 -arch=native}
LIMIT=${LIMIT:-120}

die() {
	echo "run.sh: $*" >&2
	exit 2
}

[ -n "${GAIAFS:-}" ] || die "say where gaiafs is: GAIAFS=build/gaiafs $0"
GAIAFS=$(realpath -e "$GAIAFS") || die "$GAIAFS is not there"
command -v "$NVCC" >/dev/null || [ ! -x /usr/local/cuda/bin/nvcc ] || NVCC=/usr/local/cuda/bin/nvcc
command -v "$NVCC" >/dev/null || die "$NVCC is not installed"

work=$(mktemp -d /tmp/gaiafs-gputest.XXXXXX)
mounted=()
cleanup() {
	for m in ${mounted[@]+"${mounted[@]}"}; do "$GAIAFS" umount "$m" || umount -l "$m"; done
	rm -rf "$work"
}
trap cleanup EXIT

# mount_at NAME GPUS mounts $work/NAME.source at $work/NAME.
mount_at() {
	mkdir "$work/$1" "$work/$1.source" || return
	"$GAIAFS" mount --daemon --gpus "$2" "$work/$1.source" "$work/$1" || return
	mounted+=("$work/$1")
}

ok=0 failed=0 skipped=0
# report NAME STATUS prints a result. The test's messages are in $work/words.
report() {
	local words
	words=$(tr '\n' ' ' <"$work/words" | sed 's/ *$//')
	case $2 in
	0) ok=$((ok + 1)); echo "ok $1${words:+: $words}" ;;
	77) skipped=$((skipped + 1)); echo "skip $1: $words" ;;
	124) failed=$((failed + 1)); echo "FAIL $1: not done within $LIMIT s $words" ;;
	*) failed=$((failed + 1)); echo "FAIL $1: ${words:-status $2}" ;;
	esac
}

names=("$@")
wanted() {
	[ ${#names[@]} -eq 0 ] && return 0
	local n
	for n in "${names[@]}"; do [ "$n" = "$1" ] && return 0; done
	return 1
}

# check NAME COMMAND... runs a test, unless NAMEs were given and this is not one of them.
check() {
	local name=$1
	shift
	wanted "$name" || return 0
	timeout --kill-after=10 "$LIMIT" "$@" >"$work/words" 2>&1
	report "$name" $?
}

# same FILE WORDS waits until the file begins with the words.
same() {
	local i
	for i in $(seq 200); do
		[ "$(head -c ${#2} "$1" 2>/dev/null | tr -d '\0')" = "$2" ] && return 0
		sleep 0.1
	done
	return 1
}

# killed kills a program whose kernel spins. What it stored must come home, and the mount must go on.
killed() {
	local words="stored by a kernel" file="$work/one/killed" pid said="" status=0
	truncate -s 8192 "$file"
	coproc SPIN { exec "$work/bin/spin" "$file" "$words" 2>&1; }
	pid=$SPIN_PID
	if ! read -r -t 60 said <&"${SPIN[0]}" || [ "$said" != spinning ]; then
		echo "spin: ${said:-no answer}"
		status=1
	fi
	kill -KILL "$pid" 2>/dev/null
	wait "$pid" 2>/dev/null
	[ $status = 0 ] || return 1
	same "$file" "$words" || { echo "the words are not in the file 20 s after the kill"; return 1; }
	timeout "$LIMIT" "$work/bin/scenarios" pointer "$work/one" || { echo "the mount does not work afterwards"; return 1; }
	"$GAIAFS" status "$work/one" >/dev/null || { echo "gaiafs status fails"; return 1; }
}

mkdir "$work/bin"
echo "building"
{
	make -C "$here/.." GAIAFS_BUILD="$work/build" libgaiafs &&
		for program in spin scenarios; do
			# shellcheck disable=SC2086
			"$NVCC" $NVCC_FLAGS -I"$here/.." -o "$work/bin/$program" "$here/$program.cu" "$work/build/libgaiafs.a" -ldl || exit
		done &&
		make -C "$here/../examples" GAIAFS_BUILD="$work/build" NVCC="$NVCC" NVCC_FLAGS="$NVCC_FLAGS" EXAMPLES="vecadd reduce stream shard"
} >"$work/log" 2>&1 || { cat "$work/log"; die "the tests do not build"; }
sgemm=0
make -C "$here/../examples" GAIAFS_BUILD="$work/build" NVCC="$NVCC" NVCC_FLAGS="$NVCC_FLAGS" EXAMPLES=sgemm >"$work/log" 2>&1 || sgemm=1
if [ $sgemm = 1 ] && ! grep -qE 'cublas_v2.h|lcublas' "$work/log"; then
	cat "$work/log"
	die "sgemm does not build"
fi

mount_at one cuda:0 || die "mounting with --gpus cuda:0 failed"
for example in vecadd reduce stream shard; do check "$example" "$work/build/examples/$example" "$work/one"; done
if wanted sgemm; then
	if [ $sgemm = 0 ]; then
		check sgemm "$work/build/examples/sgemm" "$work/one"
	else
		echo "cuBLAS is not installed" >"$work/words"
		report sgemm 77
	fi
fi
for scenario in $("$work/bin/scenarios" --list); do
	case $scenario in two-gpus | visible) continue ;; esac
	check "$scenario" "$work/bin/scenarios" "$scenario" "$work/one"
done
if wanted killed; then
	killed >"$work/words" 2>&1
	report killed $?
fi

if [ "$(nvidia-smi -L 2>/dev/null | grep -c ^GPU)" -ge 2 ]; then
	if wanted two-gpus || wanted visible; then
		mount_at two cuda:0,1 || die "mounting with --gpus cuda:0,1 failed"
	fi
	check two-gpus "$work/bin/scenarios" two-gpus "$work/two"
	check visible env CUDA_VISIBLE_DEVICES=1 "$work/bin/scenarios" visible "$work/two"
else
	for name in two-gpus visible; do
		wanted $name || continue
		echo "needs two GPUs" >"$work/words"
		report $name 77
	done
fi

# What was stored is in the backing files once the mounts are gone.
for m in "${mounted[@]}"; do
	"$GAIAFS" umount "$m" >"$work/words" 2>&1
	report "umount-$(basename "$m")" $?
done
mounted=()
echo "$ok passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
