package main

import (
	"context"
	_ "embed"
	"fmt"
	"os/exec"
)

// safetensorsProgram loads files with safetensors and PyTorch, and answers orders as a worker does.
//
//go:embed safetensors.py
var safetensorsProgram string

// errorMissing makes an errMissing from the reason why a program cannot be started.
func errorMissing(err error) error { return fmt.Errorf("%w: %w", errMissing, err) }

// startSafetensors starts the Python program on a GPU. The program is killed when ctx ends. It fails with errMissing if
// Python or a module is missing.
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
