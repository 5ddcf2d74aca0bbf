##@ Page kernels

.PHONY: ptx
ptx: ## Compile the GPU page kernels (gpubackend/cuda/kernels.cu) to the PTX that is embedded; needs nvcc
	gpubackend/cuda/ptx.sh
