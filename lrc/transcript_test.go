package lrc

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/model"
)

var update = flag.Bool("update", false, "rewrite the transcripts of testdata with what happens now")

// TestTranscripts runs the programs of testdata, one for each trap and race. An indented line is the result of the line
// above it. The other lines are
//
//	layout write-back     before the first step: the kernel caches writes
//	CLIENT OPERATION …    a step, as package model writes it; 1p8 is byte 8 of page 1
//	dump                  the state of the File
//	# …                   for the reader
//
// Every step is compared with the reference model too.
func TestTranscripts(t *testing.T) {
	compareTranscripts(t, "testdata/*.txt", func(t *testing.T, text string) string {
		got, err := transcribe(text)
		require.NoError(t, err)
		return got
	})
}

// compareTranscripts compares each file of pattern with the output of run for it, or rewrites it.
func compareTranscripts(t *testing.T, pattern string, run func(t *testing.T, text string) string) {
	t.Helper()
	again := "go test ./lrc -run " + t.Name() + " -update rewrites it"
	files, err := filepath.Glob(pattern)
	require.NoError(t, err)
	require.NotEmpty(t, files)
	for _, name := range files {
		t.Run(strings.TrimSuffix(filepath.Base(name), ".txt"), func(t *testing.T) {
			text, err := os.ReadFile(name)
			require.NoError(t, err)
			got := run(t, string(text))
			if *update {
				require.NoError(t, os.WriteFile(name, []byte(got), 0o644))
				return
			}
			require.Equal(t, string(text), got, again)
		})
	}
}

// transcribe runs the commands of a transcript and returns the correct transcript.
func transcribe(text string) (string, error) {
	l := model.DefaultLayout(false)
	l.Size = int64(l.Pages) * model.PageSize
	var out strings.Builder
	var run *model.Run
	var x *executor
	var commands []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, " ") {
			commands = append(commands, strings.TrimRight(line, "\n"))
		}
	}
	for i := 0; i < len(commands); i++ {
		line := commands[i]
		out.WriteString(line + "\n")
		switch {
		case line == "" || line[0] == '#':
			continue
		case line == "layout write-back":
			l.WriteBack = true
			continue
		}
		if run == nil {
			x = newExecutorAt(0, l, none)
			x.log = new(strings.Builder)
			run = model.NewRun(l, x)
		}
		x.log.Reset()
		switch line {
		case "dump":
			out.WriteString(indent(x.f.Dump()))
			continue
		}
		s, err := l.ParseStep(line)
		if err != nil {
			return "", err
		}
		var second *model.Step
		if i+1 < len(commands) && strings.HasSuffix(commands[i+1], " during") {
			i++
			out.WriteString(commands[i] + "\n")
			t, err := l.ParseStep(commands[i])
			if err != nil {
				return "", err
			}
			second = &t
		}
		if err := transcribeStep(run, s, second, &out, x); err != nil {
			return "", fmt.Errorf("%s: %w", line, err)
		}
	}
	return out.String(), nil
}

func transcribeStep(run *model.Run, s model.Step, second *model.Step, out *strings.Builder, x *executor) error {
	x.read = nil
	before := x.overlaps
	done, err := false, error(nil)
	if second != nil {
		done, err = run.StepDuring(s, *second)
	} else {
		done, err = run.Step(s)
	}
	if err != nil {
		return err
	}
	if !done {
		return fmt.Errorf("not legal now")
	}
	for line := range strings.Lines(x.log.String()) {
		if strings.HasPrefix(line, " ") {
			out.WriteString(line)
		}
	}
	if s.Op == model.Read || s.Op == model.DirectRead || s.Op == model.Load {
		fmt.Fprintf(out, "  reads % x\n", x.read)
	}
	if n := x.overlaps - before; n > 0 {
		fmt.Fprintf(out, "  %d overlapping bytes\n", n)
	}
	return nil
}

func indent(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("  " + line)
	}
	return b.String()
}
