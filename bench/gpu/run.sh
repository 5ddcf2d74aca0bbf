#!/bin/bash
# Runs the tests and the benchmarks of gaiafs on the GPUs of this machine. It belongs into the folder that `make
# gpu-bundle` makes, and needs the files there. It uses nvcc, PyTorch, safetensors and cuFile if they are installed.
#
#   ./run.sh [--tests] [--bench] [--quick] [--gpus 0,1] [--out DIR] [--dir DIR] [--size SIZE] [--time SECONDS] [--list]
#            [STEP...]
#
#   --tests, --bench  only the tests, only the benchmarks; without either, both
#   --quick           fewer steps and smaller files: a few minutes
#   --gpus 0,1        the GPUs, as CUDA counts them; default: all. emulated:2 checks the benchmarks without a GPU
#   --out DIR         where logs and results go (default: gpu-results in the current folder)
#   --dir DIR         a folder on the filesystem to measure on, with free space for --size and 3 GiB more
#                     (default: TMPDIR, or /tmp)
#   --size SIZE       size of the file that benchmarks load (default: 10GiB)
#   --time SECONDS    for everything (default: 1500, or 420 with --quick). What does not fit is left out
#   STEP...           only these steps; --list names them
#
# Each step has a time limit and a log of its own. If one fails, the others still run. At the end, it prints the table
# of the benchmarks and a line for each step; DIR/results.json has the same. The exit status is 1 if a step failed, 2 if
# nothing could be run.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)

die() {
	echo "run.sh: $*" >&2
	exit 2
}
usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }

tests=0 bench=0 quick=0 list=0 gpus='' out=gpu-results dir=${TMPDIR:-/tmp} size='' budget='' names=()
while [ $# -gt 0 ]; do
	case $1 in
	--gpus | --out | --dir | --size | --time) [ $# -ge 2 ] || die "$1 needs a value" ;;
	esac
	case $1 in
	--tests) tests=1 ;;
	--bench) bench=1 ;;
	--quick) quick=1 ;;
	--list) list=1 ;;
	--gpus) gpus=${2#cuda:}; shift ;;
	--out) out=$2; shift ;;
	--dir) dir=$2; shift ;;
	--size) size=$2; shift ;;
	--time) budget=$2; shift ;;
	-h | --help) usage; exit 0 ;;
	-*) die "there is no option $1; --help lists them" ;;
	*) names+=("$1") ;;
	esac
	shift
done
[ $tests$bench != 00 ] || tests=1 bench=1
budget=${budget:-$([ $quick = 1 ] && echo 420 || echo 1500)}
[[ $budget =~ ^[1-9][0-9]*$ ]] || die "--time $budget is not a number of seconds"
if [ -z "$gpus" ]; then
	count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
	[ "$count" -gt 0 ] || [ $list = 1 ] || die "nvidia-smi finds no GPU here: name those to use with --gpus 0,1, or --gpus emulated:2"
	gpus=$(seq -s , 0 $((count > 0 ? count - 1 : 0)))
fi
emulated=0
case $gpus in
emulated:[1-9]) emulated=1 devices=$gpus ;;
*)
	[[ $gpus =~ ^[0-9]+(,[0-9]+)*$ ]] || die "--gpus $gpus: write GPU numbers such as 0,1"
	devices=cuda:$gpus
	;;
esac
IFS=, read -r -a gpu <<<"$gpus"

# on N prints the environment of tests on the first N GPUs. The tests number them from 0, whichever GPUs they are.
on() {
	local IFS=,
	echo "GAIAFS_REQUIRE_GPU=1 CUDA_VISIBLE_DEVICES=${gpu[*]:0:$1} GAIAFS_TEST_GPUS=cuda:$(seq -s , 0 $(($1 - 1)))"
}

steps=()
# step NAME LIMIT FOLDER COMMAND... adds a step. Its command runs in that folder of the bundle.
step() {
	local s
	s=$(printf '%q ' "$@")
	steps+=("$s")
}

all=${#gpu[@]}
test_flags=(-test.v -test.timeout=10m)
if [ $tests = 1 ]; then
	step bench-tests 150 src/bench/gpu env GAIAFS_BINARY="$here/gaiafs" ./gpu.test "${test_flags[@]}"
fi
# Words of $(on N) contain no spaces.
# shellcheck disable=SC2046
if [ $tests = 1 ] && [ $emulated = 0 ]; then
	# GPUs support six of eight modes: 20,000 of these steps.
	steps_in_all=28000 stress=()
	[ $quick = 0 ] || steps_in_all=2000 stress=(-stress.ops 20000 -stress.for 5s)
	step cuda 200 src/gpubackend/cuda env $(on $all) ./gpu.test "${test_flags[@]}"
	step client-go 120 src/client/go env $(on 1) ./gpu.test "${test_flags[@]}"
	step pagecache 400 src/pagecache env $(on $all) ./gpu.test "${test_flags[@]}"
	for n in 1 2 4; do
		[ $n -le $all ] || continue
		step random-$n 300 src/internal/mounttest env $(on $n) ./gpu.test "${test_flags[@]}" -steps=$steps_in_all
	done
	step stress 300 src/internal/stress env $(on $((all < 2 ? all : 2))) ./gpu.test "${test_flags[@]}" ${stress[@]+"${stress[@]}"}
	step c 400 src/client/c env GAIAFS="$here/gaiafs" LIMIT=60 gputest/run.sh
	step python 300 src/client/python env GAIAFS="$here/gaiafs" PATH="$here:$PATH" PYTHONPATH=. \
		GAIAFS_LIBRARY="$here/libgaiafs.so.0" python3 tests/gpu/run_gpu.py
fi
if [ $bench = 1 ]; then
	file=10GiB large=100GiB runs=5
	[ $quick = 0 ] || file=2GiB large=10GiB runs=3
	# It ends by itself before its limit, and prints the table of its results.
	step bench 420 . ./gpu-bench --gpus "$devices" --gaiafs "$here/gaiafs" --dir @WORK@ --size "${size:-$file}" --large $large \
		--runs $runs --time @TIME@ --json @OUT@/bench.json --markdown @OUT@/bench.md
fi
# These run only if they are named: the cost of a mount for CPU programs, and of parts of gaiafs without a mount.
if [ $bench = 1 ]; then
	step gaiafs-bench 200 . ./gaiafs bench --quick --gpus "$devices" --dir @WORK@ --json @OUT@/gaiafs-bench.json \
		--html @OUT@/gaiafs-bench.html
fi
# shellcheck disable=SC2046
if [ $bench = 1 ] && [ $emulated = 0 ]; then
	step cuda-bench 200 src/gpubackend/cuda env $(on 1) ./gpu.test -test.run '^$' -test.bench . -test.benchtime 100x
	step pagecache-bench 300 src/pagecache env $(on $all) GAIAFS_BENCH_DIR=@WORK@ ./gpu.test -test.run '^$' -test.bench . -test.benchtime 5x
fi
step_name() { echo "${1%% *}"; }
if [ $list = 1 ]; then
	for s in "${steps[@]}"; do step_name "$s"; done
	exit 0
fi
for n in ${names[@]+"${names[@]}"}; do
	known=0
	for s in "${steps[@]}"; do [ "$(step_name "$s")" != "$n" ] || known=1; done
	[ $known = 1 ] || die "there is no step $n; --list names them"
done
wanted() {
	local n
	[ ${#names[@]} -gt 0 ] || case $1 in *-bench) return 1 ;; *) return 0 ;; esac
	for n in "${names[@]}"; do [ "$n" != "$1" ] || return 0; done
	return 1
}

# Every step needs these.
[ -c /dev/fuse ] || die "there is no /dev/fuse: load the module fuse, or start the container with --device /dev/fuse --cap-add SYS_ADMIN"
[ "$(id -u)" = 0 ] || command -v fusermount3 >/dev/null || die "mounting needs root, or fusermount3 (the package fuse3)"

mkdir -p "$out" || die "$out cannot be made; choose another folder with --out"
out=$(cd "$out" && pwd)
# Everything that steps make is below this folder. Its name is short because sockets are made there.
work=$(mktemp -d "$dir/gaiafs-gpu.XXXXXX") || die "$dir cannot be written; choose another folder with --dir"
work=$(cd "$work" && pwd -P)
child=''
cleanup() {
	trap '' INT TERM HUP
	if [ -n "$child" ]; then
		kill -TERM "$child" 2>/dev/null
		wait "$child" 2>/dev/null
	fi
	unmount_left
	rm -rf --one-file-system "$work"
}
# unmount_left unmounts what a step left mounted below the work folder, and says so.
unmount_left() {
	local m
	awk -v w="$work/" '$3 ~ /^fuse/ && index($2, w) == 1 { print $2 }' /proc/self/mounts | sort -r | while read -r m; do
		echo "left mounted, now unmounted: $m"
		umount -l "$m" 2>/dev/null || fusermount3 -u -z "$m"
	done
}
trap cleanup EXIT
trap 'exit 130' INT TERM HUP

# bytes SIZE prints a size of --size as a number.
bytes() { numfmt --from=iec "$(sed 's/I\{0,1\}B$//' <<<"${1^^}")" 2>/dev/null; }

# missing NAME FOLDER prints why a step cannot run here.
missing() {
	local nvcc room need
	[ -d "$here/$2" ] || { echo "$2 is not in the bundle"; return; }
	case $1 in
	c)
		[ -x "$here/$2/gputest/run.sh" ] || { echo "client/c/gputest is not in the bundle"; return; }
		nvcc=$(command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
		[ -n "$nvcc" ] || echo "nvcc is not installed"
		;;
	bench)
		[ -x "$here/gpu-bench" ] || { echo "gpu-bench is not in the bundle"; return; }
		# The loaded file, and two of 1 GiB at the same time.
		room=$(df --output=avail -B1 "$work" | tail -n 1)
		need=$(bytes "${size:-$file}") || return
		need=$((need + (3 << 30)))
		[ "$room" -ge $need ] || echo "$dir has $((room >> 20)) MiB of free space and $((need >> 20)) MiB are needed: choose another folder with --dir, or a smaller --size"
		;;
	python)
		[ -e "$here/$2/tests/gpu/run_gpu.py" ] || { echo "client/python/tests/gpu is not in the bundle"; return; }
		python3 -c 'import torch' 2>/dev/null || echo "Python with PyTorch is not installed"
		;;
	esac
}

begin=$SECONDS failed=0 ran=0 lines=()
json=''
# record NAME RESULT SECONDS WORDS
record() {
	local words=${4//\\/}
	words=${words//\"/\'}
	lines+=("$(printf '%-12s %-8s %4d s  %s' "$1" "$2" "$3" "$4")")
	json+="${json:+,}
    {\"step\": \"$1\", \"result\": \"$2\", \"seconds\": $3, \"words\": \"$words\", \"log\": \"$1.log\"}"
	{
		printf '{\n  "version": "%s",\n  "gpus": "%s",\n  "quick": %s,\n  "steps": [%s\n  ],\n  "bench": %s\n}\n' \
			"$(cat "$here/VERSION" 2>/dev/null)" "$gpus" "$([ $quick = 1 ] && echo true || echo false)" "$json" \
			"$(cat "$out/bench.json" 2>/dev/null || echo null)"
	} >"$out/results.json"
}

# run_step NAME LIMIT FOLDER COMMAND...
run_step() {
	local name=$1 limit=$2 folder=$3 left why status start words arguments=() a
	shift 3
	left=$((budget - (SECONDS - begin)))
	why=$(missing "$name" "$folder")
	[ $left -ge 20 ] || why="the time was over"
	if [ -n "$why" ]; then
		echo "$name: skipped: $why"
		record "$name" skipped 0 "$why"
		return
	fi
	[ "$limit" -le "$left" ] || limit=$left
	for a in "$@"; do
		a=${a//@WORK@/$work}
		a=${a//@OUT@/$out}
		arguments+=("${a//@TIME@/$((limit > 80 ? limit - 60 : limit / 3))}")
	done
	echo "$name: at most $limit s"
	start=$SECONDS
	# timeout makes a separate process group and ends all of it.
	(cd "$here/$folder" && TMPDIR=$work exec timeout --kill-after=15 "$limit" "${arguments[@]}") >"$out/$name.log" 2>&1 </dev/null &
	child=$!
	wait "$child"
	status=$?
	child=''
	unmount_left
	ran=$((ran + 1))
	case $status in
	0) words=passed ;;
	124 | 137) words="failed: not finished within $limit s" ;;
	*) words="failed: status $status" ;;
	esac
	echo "$name: $words, $((SECONDS - start)) s"
	if [ $status = 0 ]; then
		record "$name" passed $((SECONDS - start)) "$(summary "$out/$name.log")"
		return
	fi
	failed=$((failed + 1))
	grep -E -- '--- FAIL|^FAIL|panic:|Error:|failed:' "$out/$name.log" | head -n 10 | cut -c 1-200 | sed 's/^/    /'
	tail -n 5 "$out/$name.log" | cut -c 1-200 | sed 's/^/  | /'
	record "$name" failed $((SECONDS - start)) "$words; $(summary "$out/$name.log")"
}

# summary counts the tests of a log.
summary() {
	local p f s
	p=$(grep -c -- '--- PASS' "$1") f=$(grep -c -- '--- FAIL' "$1") s=$(grep -c -- '--- SKIP' "$1")
	if [ $((p + f + s)) -gt 0 ]; then
		echo "$p passed, $f failed, $s skipped"
	else
		tail -n 1 "$1" | tr -cd '[:print:]' | cut -c 1-120
	fi
}

{
	uname -a
	nvidia-smi -L
	nvidia-smi topo -m
	nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,pcie.link.gen.current,pcie.link.width.current --format=csv
	nvcc --version || /usr/local/cuda/bin/nvcc --version
	df -h "$work"
	free -g
} >"$out/machine.log" 2>&1
echo "gaiafs $(cat "$here/VERSION" 2>/dev/null), GPUs $gpus, at most $budget s, results in $out"
for s in "${steps[@]}"; do
	eval "set -- $s" # step quoted it
	if wanted "$1"; then run_step "$@"; fi
done
if [ -s "$out/bench.log" ] && [ $bench = 1 ]; then
	if grep -q '^\[' "$out/bench.log"; then
		sed -n '/^\[/,$p' "$out/bench.log"
	else # it was killed before it could print its table
		grep -E '^[a-z]+/' "$out/bench.log"
	fi
fi
echo
printf '%s\n' "${lines[@]}"
echo "$((SECONDS - begin)) s, $failed failed; logs and results.json are in $out"
[ $ran -gt 0 ] || exit 2
[ $failed = 0 ]
