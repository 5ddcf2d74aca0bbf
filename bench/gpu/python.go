package main

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
)

// safetensorsProgram loads files by safetensors and PyTorch, and answers orders as a worker does.
//
//go:embed safetensors.py
var safetensorsProgram string

// errorMissing makes an errMissing of why a program cannot be started.
func errorMissing(err error) error { return fmt.Errorf("%w: %w", errMissing, err) }

// startSafetensors starts the Python program on a GPU. It is killed where ctx ends. errMissing where Python or a module
// of it is.
func startSafetensors(ctx context.Context, python string, device int) (*child, error) {
	c, err := startChild(exec.CommandContext(ctx, python, "-c", safetensorsProgram))
	if err != nil {
		return nil, errorMissing(err)
	}
	if _, err := c.do(order{Do: "open", Device: device}); err != nil {
		c.end()
		return nil, err
	}
	return c, nil
}
