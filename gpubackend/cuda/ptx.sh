#!/bin/sh
# Compiles the page kernels and the tests' kernel to PTX for the oldest architecture of CUDA 13, into the folder given
# (this one without). Needs nvcc. The first line of the result names the source that it was made from.
#
# nvcc writes its own version into the PTX, which older drivers refuse. Nothing in the kernels needs more than PTX 7.0
# (CUDA 11.0, driver 450); ptxas, which is given the lowered version, proves it.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
for source in kernels.cu testdata/stamp.cu; do
	name=${source%.cu}
	mkdir -p "$out/$(dirname "$name")"
	nvcc -ptx -arch=compute_75 -O3 -o "$out/$name.tmp" "$source"
	{
		printf '// Made by ptx.sh from %s, SHA-256 %s. Do not edit.\n' "$(basename "$source")" "$(sha256sum <"$source" | cut -d' ' -f1)"
		sed -e 's/^\.version .*/.version 7.0/' -e '/^\/\//d' "$out/$name.tmp"
	} >"$out/$name.ptx"
	rm "$out/$name.tmp"
	ptxas -arch=sm_75 -v -o /dev/null "$out/$name.ptx"
done
