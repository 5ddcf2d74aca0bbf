# Rules for the GPU benchmarks, and for the bundle that brings them and the tests to a machine with GPUs but without Go.

##@ Benchmarks on GPUs

.PHONY: bench-ptx
bench-ptx: ## Compile the kernels of the GPU benchmarks to the embedded PTX; needs nvcc
	bench/gpu/ptx.sh

GPU_BUNDLE := $(BUILD)/gpu-bundle
# Packages whose tests are useful on a GPU.
GPU_TESTS := gpubackend/cuda pagecache client/go internal/mounttest internal/stress bench/gpu

.PHONY: gpu-bundle
gpu-bundle: build ## Put what tests and benchmarks need on a GPU machine into build/gpu-bundle and a .tar.gz
	rm -rf $(GPU_BUNDLE) $(GPU_BUNDLE).tar.gz
	mkdir -p $(GPU_BUNDLE)/src
	git ls-files -z -- $(GPU_TESTS) client/c client/python control/testdata gpubackend/testdata internal/fakecuda \
		README.md docs/index.md \
		| tar -c --null -T - | tar -x -C $(GPU_BUNDLE)/src
	find $(GPU_BUNDLE)/src -name '*.go' -delete
	for package in $(GPU_TESTS); do \
		CGO_ENABLED=0 $(GO) test -c -trimpath -ldflags '-s -w' -o $(GPU_BUNDLE)/src/$$package/gpu.test ./$$package; \
	done
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(GPU_BUNDLE)/gpu-bench ./bench/gpu
	cp $(BUILD)/gaiafs $(BUILD)/libgaiafs.so.0 $(BUILD)/libgaiafs.a $(wildcard client/c/gaiafs.h client/c/gaiafs.hpp) $(GPU_BUNDLE)
	ln -s libgaiafs.so.0 $(GPU_BUNDLE)/libgaiafs.so
	cp bench/gpu/run.sh $(GPU_BUNDLE)
	cp docs/gpu.md $(GPU_BUNDLE)/README.md
	cp docs/bench.md $(GPU_BUNDLE)
	echo $(VERSION) > $(GPU_BUNDLE)/VERSION
	tar -C $(BUILD) -czf $(GPU_BUNDLE).tar.gz gpu-bundle
	@du -sh $(GPU_BUNDLE) $(GPU_BUNDLE).tar.gz
