// Command testsummary reads the output of go test -json and prints a summary: a line for each package and for each
// failed test. At the end it prints everything that the failed tests wrote, and how many tests passed, failed and were
// skipped. It lists the reasons for skipping, so that no test is skipped silently.
//
//	go test -json ./... | go run ./internal/testsummary -keep build/test-output
//
// With -keep, the folder gets a file for each failed package, with all its output in order. Daemons and other processes
// that a test starts write to the package's output, where it is easily mistaken for that of another test. Files of an
// earlier run are removed.
//
// It exits with 1 if a test or a build failed, or if the input has no test.
package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// event is a line of go test -json (go doc test2json).
type event struct {
	Action     string
	Package    string
	ImportPath string // for build output
	Test       string
	Elapsed    float64
	Output     string
	// FailedBuild is set if a package could not be tested because this one could not be built.
	FailedBuild string
}

// test names a test, or a package if name is empty.
type test struct{ pkg, name string }

// summary is what has been read so far.
type summary struct {
	out      io.Writer
	module   string
	keep     string              // where to keep the output of failed packages; "" if nowhere
	output   map[test][]string   // of running tests and packages
	all      map[string][]string // of running packages, with their tests
	builds   map[string][]string
	passed   int
	failed   []failure
	kept     []string // files
	skipped  []skip
	packages int
	broken   int // failed packages
}

// failure is a test that failed or did not end, and its output.
type failure struct {
	test
	how    string
	output []string
}

type skip struct {
	test
	reason string
}

func main() {
	keep := flag.String("keep", "", "the folder for the whole output of failed packages")
	flag.Parse()
	s := newSummary(os.Stdout)
	start := time.Now()
	if s.keep = *keep; s.keep != "" {
		if err := os.RemoveAll(s.keep); err != nil {
			fmt.Fprintln(os.Stderr, "testsummary:", err)
			os.Exit(1)
		}
	}
	if err := s.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testsummary:", err)
		os.Exit(1)
	}
	if !s.finish(time.Since(start)) {
		os.Exit(1)
	}
}

func newSummary(out io.Writer) *summary {
	return &summary{
		out: out, module: "github.com/gaiafs/gaiafs/",
		output: make(map[test][]string), all: make(map[string][]string), builds: make(map[string][]string),
	}
}

// read processes all events. It prints other lines unchanged.
func (s *summary) read(r io.Reader) error {
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadString('\n')
		if line != "" {
			var e event
			if json.Unmarshal([]byte(line), &e) == nil && e.Action != "" {
				s.take(e)
			} else {
				fmt.Fprint(s.out, line)
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (s *summary) take(e event) {
	t := test{strings.TrimPrefix(e.Package, s.module), e.Test}
	switch e.Action {
	case "build-output":
		s.builds[e.ImportPath] = append(s.builds[e.ImportPath], e.Output)
	case "output":
		s.output[t] = append(s.output[t], e.Output)
		s.all[t.pkg] = append(s.all[t.pkg], e.Output)
	case "pass", "fail", "skip":
		if e.Test == "" {
			s.endPackage(t, e)
			delete(s.all, t.pkg)
		} else {
			s.endTest(t, e.Action)
		}
		delete(s.output, t)
	}
}

func (s *summary) endTest(t test, action string) {
	switch action {
	case "pass":
		s.passed++
	case "skip":
		s.skipped = append(s.skipped, skip{t, reason(s.output[t])})
	case "fail":
		s.fail(t, "failed")
	}
}

func (s *summary) fail(t test, how string) {
	fmt.Fprintf(s.out, "      %s %s %s\n", t.pkg, t.name, how)
	s.failed = append(s.failed, failure{t, how, s.output[t]})
}

// reason finds the argument of t.Skip: the last line with a file and a line number.
func reason(output []string) string {
	for _, line := range slices.Backward(output) {
		if file, text, ok := strings.Cut(strings.TrimSpace(line), ": "); ok && strings.Contains(file, ".go:") {
			return text
		}
	}
	return "no reason given"
}

func (s *summary) endPackage(t test, e event) {
	if e.Action == "skip" { // a package without tests
		return
	}
	s.packages++
	if e.Action == "pass" {
		fmt.Fprintf(s.out, "ok    %6.1f s  %s\n", e.Elapsed, t.pkg)
		return
	}
	s.broken++
	fmt.Fprintf(s.out, "FAIL  %6.1f s  %s\n", e.Elapsed, t.pkg)
	if e.FailedBuild != "" {
		fmt.Fprint(s.out, strings.Join(s.builds[e.FailedBuild], ""))
	}
	// Output that belongs to no test: a panic, a leak that TestMain found, or a timeout with the tests that it ended.
	fmt.Fprint(s.out, strings.Join(s.output[t], ""))
	for running := range s.output {
		if running.pkg == t.pkg && running.name != "" {
			s.fail(running, "did not end")
			delete(s.output, running)
		}
	}
	s.keepOutput(t.pkg)
}

// keepOutput writes a package's output to a separate file.
func (s *summary) keepOutput(pkg string) {
	if s.keep == "" || len(s.all[pkg]) == 0 {
		return
	}
	name := filepath.Join(s.keep, strings.ReplaceAll(pkg, "/", "-")+".txt")
	err := os.MkdirAll(s.keep, 0o755)
	if err == nil {
		err = os.WriteFile(name, []byte(strings.Join(s.all[pkg], "")), 0o644)
	}
	if err != nil {
		fmt.Fprintf(s.out, "the output of %s could not be kept: %v\n", pkg, err)
		return
	}
	s.kept = append(s.kept, name)
}

// finish prints the totals and reports whether everything passed.
func (s *summary) finish(took time.Duration) bool {
	slices.SortFunc(s.skipped, func(a, b skip) int {
		return cmp.Or(cmp.Compare(a.pkg, b.pkg),
			cmp.Compare(a.name, b.name))
	})
	if len(s.skipped) > 0 {
		fmt.Fprintln(s.out, "\nSkipped:")
		for _, k := range s.skipped {
			fmt.Fprintf(s.out, "  %s %s: %s\n", k.pkg, k.name, k.reason)
		}
	}
	for _, f := range s.failed {
		fmt.Fprintf(s.out, "\n%s %s %s:\n%s\n", f.pkg, f.name, f.how, strings.Join(f.output, ""))
	}
	if len(s.failed) > 0 {
		fmt.Fprintln(s.out, "\nFailed:")
		for _, f := range s.failed {
			fmt.Fprintf(s.out, "  %s %s\n", f.pkg, f.name)
		}
	}
	if len(s.kept) > 0 {
		fmt.Fprintln(s.out, "\nThe whole output of packages that failed:")
		for _, name := range s.kept {
			fmt.Fprintf(s.out, "  %s\n", name)
		}
	}
	fmt.Fprintf(s.out, "\n%d packages: %d tests passed, %d failed, %d were skipped, in %s.\n",
		s.packages, s.passed, len(s.failed), len(s.skipped), took.Round(time.Second))
	if s.packages == 0 {
		fmt.Fprintln(s.out, "There were no tests.")
	}
	return s.broken == 0 && len(s.failed) == 0 && s.packages > 0
}
