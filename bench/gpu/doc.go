// Command gpu measures gaiafs on GPUs against what GPU programs do without it, and prints a table of ratios.
//
//	gpu [--gpus cuda:0,1] [--size 10GiB] [--rows warm,release] [--runs 5] [--time 360] [--json FILE] [--markdown FILE]
//
// # Model
//
// It runs a gaiafs binary as the daemon of a mount, and maps files by the client library, as a program would. Package
// bench/rows measures the sides of a row in turns and judges them. A row's line is printed as soon as it is measured,
// and the JSON file is written anew with each, so that a run that is cut off leaves what it has.
//
// What a GPU program does besides mapping (private memory, copies, kernels) is a gpu here: cudaGPU by the CUDA driver,
// loaded at run time, with kernels from kernels.cu; hostGPU in host memory, for emulated devices. So the rows are the
// same code on both, and are tested where there is no GPU. Figures of emulated devices say nothing.
//
// # Checks
//
// Every time that gaiafs is measured, the bytes in the device's memory are compared afterwards with what they should
// be: by SHA-256, or byte by byte where a formula says what they are. A difference ends the run with an error.
//
// # Ownership
//
// The session owns the mount, the files, the worker processes and the page-locked buffers, and takes them away on every
// way out, signals included. Workers and the daemon end with the program that started them, also when it is killed.
//
// # What it does not do
//
// It resets nothing and changes no setting of a GPU. Only caches of the kernel are dropped, which needs root.
package main
