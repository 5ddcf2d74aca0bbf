// Command gpu measures gaiafs on GPUs against what GPU programs do without it, and prints a table of ratios.
//
//	gpu [--gpus cuda:0,1] [--size 10GiB] [--rows warm,release] [--runs 5] [--time 360] [--json FILE] [--markdown FILE]
//
// # Model
//
// It runs a gaiafs binary as the daemon of a mount, and maps files through the client library, as a program would.
// Package bench/rows measures the sides of a row in turn and judges them. Each row is printed as soon as it is
// measured, and the JSON file is rewritten after each row, so an interrupted run keeps its results.
//
// Everything else that a GPU program does (private memory, copies, kernels) goes through the interface gpu. cudaGPU
// implements it with the CUDA driver, loaded at run time, and kernels from kernels.cu. hostGPU implements it in host
// memory, for emulated devices. So the rows are the same code on both, and can be tested without a GPU. Figures of
// emulated devices mean nothing.
//
// # Checks
//
// After every measurement of gaiafs, the bytes in the device's memory are compared with the expected ones: by SHA-256,
// or byte by byte if a formula defines them. A difference ends the run with an error.
//
// # Ownership
//
// The session owns the mount, the files, the worker processes and the page-locked buffers. It removes them however the
// run ends, also after signals. Workers and the daemon end with the program that started them, even if it is killed.
//
// # What it does not do
//
// It resets nothing and changes no setting of a GPU. It only drops caches of the kernel, which needs root.
package main
