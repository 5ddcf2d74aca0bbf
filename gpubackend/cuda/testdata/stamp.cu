// What the peer of the conformance suite stores with: n bytes, stride apart, each by a store of its own.
extern "C" __global__ void stamp(
	unsigned long long address, unsigned long long stride, unsigned long long n, unsigned long long value)
{
	unsigned long long threads = (unsigned long long)gridDim.x * blockDim.x;
	for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += threads) {
		*(volatile unsigned char *)(address + i * stride) = (unsigned char)value;
	}
}
