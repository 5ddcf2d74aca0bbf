#!/bin/sh
# Compiles the bench's kernels to PTX for the oldest architecture of CUDA 13, into a folder (default: this one). Needs
# nvcc. The first line of the result has the hash of the source. gpubackend/cuda/ptx.sh says why the version is lowered.
set -eu
cd "$(dirname "$0")"
out=${1:-.}
mkdir -p "$out"
nvcc -ptx -arch=compute_75 -O3 -o "$out/kernels.tmp" kernels.cu
{
	printf '// Made by ptx.sh from kernels.cu, SHA-256 %s. Do not edit.\n' "$(sha256sum <kernels.cu | cut -d' ' -f1)"
	sed -e 's/^\.version .*/.version 7.0/' -e '/^\/\//d' "$out/kernels.tmp"
} >"$out/kernels.ptx"
rm "$out/kernels.tmp"
ptxas -arch=sm_75 -v -o /dev/null "$out/kernels.ptx"
