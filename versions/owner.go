package versions

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Owner is a holder of replicas: the CPU, or a device.
type Owner uint8

// CPU is the owner of the kernel's page cache, shared by all CPU programs.
const CPU Owner = 0

// MaxGPU is the highest ordinal that a device may have.
const MaxGPU = 254

// ErrNoOwner means that a text names no owner.
var ErrNoOwner = errors.New("no such owner")

// GPU returns the owner that stands for the device with that ordinal. It panics if ordinal is not in [0, MaxGPU].
func GPU(ordinal int) Owner {
	if ordinal < 0 || ordinal > MaxGPU {
		panic("versions: no owner for device " + strconv.Itoa(ordinal))
	}
	return Owner(ordinal + 1)
}

// Ordinal returns the ordinal of the owner's device, -1 for the CPU.
func (o Owner) Ordinal() int { return int(o) - 1 }

// String returns "cpu", or "gpu" and the ordinal.
func (o Owner) String() string {
	if o == CPU {
		return "cpu"
	}
	return "gpu" + strconv.Itoa(o.Ordinal())
}

// MarshalText returns String's text. It never fails.
func (o Owner) MarshalText() ([]byte, error) { return []byte(o.String()), nil }

// UnmarshalText is the inverse of MarshalText. It accepts no other spelling, and fails with ErrNoOwner.
func (o *Owner) UnmarshalText(text []byte) error {
	x, err := parseOwner(string(text))
	if err == nil {
		*o = x
	}
	return err
}

func parseOwner(s string) (Owner, error) {
	if s == "cpu" {
		return CPU, nil
	}
	digits, ok := strings.CutPrefix(s, "gpu")
	n, err := strconv.Atoi(digits)
	// The number's own spelling rules out signs and leading zeros.
	if !ok || err != nil || n < 0 || n > MaxGPU || strconv.Itoa(n) != digits {
		return 0, fmt.Errorf("%w: %q", ErrNoOwner, s)
	}
	return GPU(n), nil
}

// Version counts the releases that an owner made of a page.
type Version uint64
