package cuda

import _ "embed"

// kernelsPTX has the page kernels, compiled from kernels.cu.
//
//go:generate ./ptx.sh
//go:embed kernels.ptx
var kernelsPTX []byte
