package main

import (
	"fmt"
	"strconv"
	"strings"
)

// address is an address in a GPU's address space, or in this process for memory of an emulated device.
type address uintptr

// gpu is what a program can do with a GPU besides gaiafs. The methods may be called concurrently from any goroutine.
// Each returns when its work is done, and uses the caller's host memory until then.
type gpu interface {
	// device returns the device number for gaiafs.Map.
	device() int
	alloc(n int64) (address, error)
	free(a address) error
	// pinned returns host memory with which copies are fastest. It is freed when the process ends.
	pinned(n int64) ([]byte, error)
	copyIn(to address, from []byte) error
	copyOut(to []byte, from address) error
	copyWithin(to, from address, n int64) error
	// touch adds value to n bytes, the first at a and each step bytes after the one before.
	touch(a address, step, n int64, value byte) error
	// paint stores stripes at a, in several passes. The seed grows by one with every pass, up to that of s.
	paint(a address, s stripes, passes int) error
	// freeMemory returns the number of free bytes.
	freeMemory() (int64, error)
	String() string
}

// stripes are what one of several writers stores into memory: every writers-th stripe of width bytes, beginning with
// stripe number first. Byte i of the memory becomes painted(i, seed).
type stripes struct {
	size, width    int64
	first, writers int64
	seed           byte
}

// painted returns the byte that any writer's stripes store at i. It differs from that of every other seed.
func painted(i int64, seed byte) byte { return byte(i^i>>8^i>>16) + seed }

// each calls f for every stripe in p, which is the memory from byte `at` on.
func (s stripes) each(at int64, p []byte, f func(part []byte, at int64)) {
	end := at + int64(len(p))
	k := max(0, (at/s.width-s.first)/s.writers)
	for from := (s.first + k*s.writers) * s.width; from < end; from += s.writers * s.width {
		if low, high := max(from, at), min(from+s.width, end); low < high {
			f(p[low-at:high-at], low)
		}
	}
}

// pass returns the stripes of a pass, counted from 0, out of passes.
func (s stripes) pass(i, passes int) stripes {
	s.seed -= byte(passes - 1 - i)
	return s
}

// store stores the stripes into p, which is the memory from byte `at` on.
func (s stripes) store(at int64, p []byte) {
	s.each(at, p, func(part []byte, at int64) {
		for i := range part {
			part[i] = painted(at+int64(i), s.seed)
		}
	})
}

// wrong counts the bytes of p, which begins at byte `at`, that no writer's stripes store with this seed.
func wrong(p []byte, at int64, seed byte) (n int64) {
	for i, b := range p {
		if b != painted(at+int64(i), seed) {
			n++
		}
	}
	return n
}

// deviceChoice is the value of --gpus, which means the same as for gaiafs mount.
type deviceChoice struct {
	emulated bool
	ordinals []int
}

// parseDevices reads "cuda:0,1" or "emulated:2".
func parseDevices(text string) (c deviceChoice, err error) {
	kind, argument, _ := strings.Cut(strings.ToLower(text), ":")
	switch kind {
	case "emulated":
		n, err := strconv.Atoi(argument)
		if err != nil || n < 1 {
			return c, fmt.Errorf("%q: write a number of emulated devices, as in emulated:2", text)
		}
		c.emulated = true
		for i := range n {
			c.ordinals = append(c.ordinals, i)
		}
		return c, nil
	case "cuda":
		for field := range strings.SplitSeq(argument, ",") {
			n, err := strconv.Atoi(field)
			if err != nil || n < 0 {
				return c, fmt.Errorf("%q: %q is not the number of a GPU; write the GPUs as in cuda:0,1", text, field)
			}
			c.ordinals = append(c.ordinals, n)
		}
		return c, nil
	}
	return c, fmt.Errorf("%q is neither cuda:0,1 nor emulated:2", text)
}

// open opens the devices in this process.
func (c deviceChoice) open() (all []gpu, err error) {
	for _, n := range c.ordinals {
		var g gpu = hostGPU(n)
		if !c.emulated {
			if g, err = openCUDA(n); err != nil {
				return nil, err
			}
		}
		all = append(all, g)
	}
	return all, nil
}
