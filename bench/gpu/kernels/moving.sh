#!/bin/bash
# Measures memory that moves on cuda:0: kernels over a file of 4 GiB, or $MIB MiB. Device memory shrinks from the whole
# file to an eighth of it, under each eviction rule. The other sides are a mapping that stays, a copy, pinned memory and
# managed memory.
#
#   GAIAFS=./gaiafs LIBRARY=./libgaiafs.a INCLUDE=DIR moving.sh FOLDER
#
# MEMORY="5G=lru 2G=lru,lfu" names budgets, and the rules for each.
#
# FOLDER needs 4 GiB of free space, best in memory (/dev/shm). Needs nvcc.
set -u -o pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$1 mib=${MIB:-4096} accesses=${ACCESSES:-512} passes=${PASSES:-16}
work=$(mktemp -d "$folder/gaiafs-moving.XXXXXX")
trap '"$GAIAFS" umount "$work/m" 2>/dev/null; rm -rf "$work"' EXIT
mkdir "$work/s" "$work/m"
PATH=$PATH:/usr/local/cuda/bin
if [ -x "${BUILT:-}/moving" ]; then # made before
	cp "$BUILT/moving" "$work" || exit
else
	nvcc -O2 -std=c++17 -arch=native -I"$INCLUDE" -o "$work/moving" "$here/moving.cu" "$LIBRARY" -ldl -lpthread || exit
fi
"$work/moving" make "$work/s/f" $mib || exit
# mounted MEMORY RULE COMMAND... runs the command on a mount.
mounted() {
	local memory=$1 rule=$2
	shift 2
	"$GAIAFS" mount --daemon --gpus cuda:0 --gpu-memory "$memory" --pinned-memory "${PINNED:-8G}" \
		--eviction "$rule" "$work/s" "$work/m" >/dev/null || return
	"$@"
	"$GAIAFS" umount "$work/m" || echo "umount failed"
}
each() { # KIND FILE
	local order
	for order in ${ORDERS:-stream random skewed}; do
		echo -n "$label "
		"$work/moving" run "$2" $mib "$1" "$order" "$accesses" "$passes" || echo FAILED
	done
}
for kind in ${BASE-copy pinned managed}; do label="-         " each "$kind" "$work/s/f"; done
label="all mapping" mounted "$((mib * 5 / 4))M" lru each mapping "$work/m/f"
for memory in ${MEMORY-5G 3277M 2G 1G}; do
	rules=${RULES:-allocated lru lfu flexgpu gpuswap random}
	[[ $memory != *=* ]] || rules=${memory#*=}
	for rule in ${rules//,/ }; do
		label="${memory%=*} $rule" mounted "${memory%=*}" "$rule" each movable "$work/m/f"
	done
done
mounted "$((mib / 4))M" lru "$work/moving" check "$work/m/f" $mib ${CHECKS:-1000}
