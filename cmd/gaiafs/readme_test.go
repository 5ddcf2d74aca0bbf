package main

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/pagecache/residency/policy"
	"github.com/gaiafs/gaiafs/prefetch"
)

// example returns the only block of docs/howto/programs.md in a language.
func example(t *testing.T, language string) string {
	t.Helper()
	page, err := os.ReadFile("../../docs/howto/programs.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(page), -1)
	require.Len(t, blocks, 1)
	return blocks[0][1]
}

// buildExample compiles a program of docs/howto/programs.md and returns its path.
func buildExample(t *testing.T, language string) string {
	t.Helper()
	dir := t.TempDir()
	source, program := filepath.Join(dir, "hello."+language), filepath.Join(dir, "hello")
	require.NoError(t, os.WriteFile(source, []byte(example(t, language)), 0o600))
	compiler := os.Getenv("CC")
	if compiler == "" {
		compiler = "cc"
	}
	commands := [][]string{{"go", "build", "-o", program, source}}
	if language == "c" {
		library, err := filepath.Glob("../../client/c/*.c")
		require.NoError(t, err)
		link := []string{compiler, "-std=c11", "-pthread", "-I../../client/c", "-o", program, program + ".o"}
		commands = [][]string{
			{compiler, "-Wall", "-Wextra", "-Werror", "-I../../client/c", "-c", "-o", program + ".o", source},
			append(link, library...),
		}
	}
	for _, c := range commands {
		if _, err := exec.LookPath(c[0]); err != nil && os.Getenv("GAIAFS_REQUIRE_TOOLS") == "" {
			t.Skipf("%s is missing", c[0])
		}
		out, err := exec.Command(c[0], c[1:]...).CombinedOutput()
		require.NoError(t, err, "%s\n%s", strings.Join(c, " "), out)
	}
	return program
}

// The programs of docs/howto/programs.md compile and do what it says.
func TestExamplePrograms(t *testing.T) {
	s := mountForeground(t, "--gpus=emulated:1")
	for _, language := range []string{"go", "c"} {
		t.Run(language, func(t *testing.T) {
			name := filepath.Join(s.mountpoint, "file."+language)
			require.NoError(t, os.WriteFile(name, []byte(strings.Repeat("cpu ", 2048)), 0o600))
			out, err := exec.Command(buildExample(t, language), name).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.Empty(t, string(out))
			got, err := os.ReadFile(name)
			require.NoError(t, err)
			require.Equal(t, "cpu cpu ", string(got[:8]))
			require.Equal(t, "hello from a device", string(got[4096:4115]))
			require.Equal(t, "cpu ", string(got[8188:]))
		})
	}
	s.signal(t, syscall.SIGTERM)
	require.Equal(t, exitOK, s.end(t))
}

// The links of the documents point to existing files.
func TestDocumentsPointAtFiles(t *testing.T) {
	documents := []string{"../../README.md", "../../CHANGELOG.md", "../../CONTRIBUTING.md", "../../client/python/README.md"}
	for _, folder := range []string{"docs", "docs/howto", "docs/dev", "docs/dev/adr", "bench/results"} {
		more, err := filepath.Glob("../../" + folder + "/*.md")
		require.NoError(t, err)
		documents = append(documents, more...)
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	program := regexp.MustCompile("(?ms)^```.*?^```$") // code may have brackets before parentheses, too
	for _, name := range documents {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(program.ReplaceAllString(string(text), ""), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(name), m[1]))
			require.NoError(t, err, "%s points at %s", name, m[1])
		}
	}
}

// marked matches the blocks of a page that a test runs. The comment above a block says how:
//
//	run             in order, in one folder
//	run on a mount  the same, with /mnt/data mounted and another program working on it
//	run until Enter a program that goes on while later blocks run
//	Enter, run      after that program got its Enter and ended
var marked = regexp.MustCompile(
	"(?ms)^<!-- (run|run on a mount|run until Enter|Enter, run) -->\n```(sh|python)\n(.*?)^```$")

// pageScript makes a script of the marked blocks of a page. If python is "", it leaves out Python blocks.
func pageScript(page, python string) (script string, mounted bool) {
	for i, m := range marked.FindAllStringSubmatch(page, -1) {
		how, language, text := m[1], m[2], m[3]
		mounted = mounted || how == "run on a mount"
		switch {
		case language == "python" && python == "":
			continue
		case language == "python":
			name := fmt.Sprintf("program%d.py", i)
			script += "cat > " + name + " <<'END'\n" + text + "END\n"
			if how != "run until Enter" {
				script += python + " " + name + "\n"
				continue
			}
			script += "mkfifo enter; " + python + " " + name + " < enter > said &\nexec 3> enter\n" +
				"until grep -q Enter said; do kill -0 $!; sleep 0.05; done\n"
			continue
		case how == "Enter, run" && python != "":
			script += "echo >&3; exec 3>&-; wait\n"
		}
		script += text
	}
	return strings.ReplaceAll(script, "--for 30s", "--for 1s"), mounted
}

// The commands and programs of the quick start, the how-tos and other pages do what they say.
func TestPagesRun(t *testing.T) {
	howTos, err := filepath.Glob("../../docs/howto/*.md")
	require.NoError(t, err)
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	python, _ := filepath.Abs("../../build/python/bin/python")
	library, _ := filepath.Abs("../../build/libgaiafs.so.0")
	packages, _ := filepath.Abs("../../client/python")
	for _, needed := range []string{python, library} {
		if _, err := os.Stat(needed); err != nil {
			t.Logf("programs in Python are left out: %v", err) // make test provides both
			python = ""
		}
	}
	ran := 0
	for _, page := range append(append(pages, howTos...), "../../README.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		script, mounted := pageScript(string(text), python)
		if script == "" {
			continue
		}
		ran++
		t.Run(filepath.Base(page), func(t *testing.T) {
			dir := t.TempDir()
			for _, d := range []string{"models", "data/models", "mnt/models", "mnt/data", "bin", "build", "etc/gaiafs"} {
				require.NoError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
			}
			header := `{"w":{"dtype":"F32","shape":[786432],"data_offsets":[0,3145728]}}`
			model := append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...)
			model = append(model, make([]byte, 3*mib)...)
			for _, name := range []string{"models/model.safetensors", "data/model.safetensors", "data/models/second"} {
				require.NoError(t, os.WriteFile(filepath.Join(dir, name), model, 0o600))
			}
			self, err := os.Executable()
			require.NoError(t, err)
			require.NoError(t, os.Symlink(self, filepath.Join(dir, "bin/gaiafs")))
			require.NoError(t, os.Symlink(self, filepath.Join(dir, "build/gaiafs")))
			if strings.Contains(script, "python3 ") {
				if python == "" {
					t.Skip("its programs are in Python")
				}
				wrapper := "#!/bin/sh\nexec " + python + " \"$@\"\n"
				require.NoError(t, os.WriteFile(filepath.Join(dir, "bin/python3"), []byte(wrapper), 0o755))
			}
			env := append(command(t).Env, "HOME="+dir, "PATH="+dir+"/bin:"+os.Getenv("PATH"),
				variable("gpus")+"=emulated:2",
				variable("gpu-memory")+"=32M", variable("log-file")+"="+filepath.Join(dir, "log"), "PYTHONPATH="+packages, "PYTHONDONTWRITEBYTECODE=1",
				"GAIAFS_LIBRARY="+library)
			stop := func() {}
			if mounted {
				r := gaiafsCommand(t, "mount", "--daemon", "--gpus=emulated:2", dir+"/data", dir+"/mnt/data")
				require.Equal(t, exitOK, r.code, r.err)
				stop = work(t, dir+"/mnt/data/busy")
			}
			places := strings.NewReplacer("/mnt/", dir+"/mnt/", "/etc/gaiafs/", dir+"/etc/gaiafs/", "/srv/", dir+"/",
				":9400", ":0")
			run := exec.Command("bash", "-eux", "-o", "pipefail", "-c", places.Replace(script))
			run.Env, run.Dir = env, dir
			out, err := run.CombinedOutput()
			stop()
			if err != nil || mounted { // leave no mount behind
				for _, name := range []string{"models", "data"} {
					_ = gaiafsCommand(t, "umount", "--force", filepath.Join(dir, "mnt", name))
				}
			}
			require.NoError(t, err, "%s", out)
			if slices.Contains([]string{"cowrite.md", "README.md"}, filepath.Base(page)) && python != "" {
				require.Regexp(t, `"merged_pages": [1-9]`, string(out))
			}
		})
	}
	require.GreaterOrEqual(t, ran, 10)
}

// Each gaiafs command in a block of the documents exists, and has the flags in the block.
func TestCommandsInDocuments(t *testing.T) {
	pages := []string{"../../README.md", "../../client/python/README.md"}
	for _, folder := range []string{"docs", "docs/howto"} {
		more, err := filepath.Glob("../../" + folder + "/*.md")
		require.NoError(t, err)
		pages = append(pages, more...)
	}
	seen := 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
			for line := range strings.Lines(strings.ReplaceAll(block[1], "\\\n", " ")) {
				line, _, _ = strings.Cut(line, " #")
				line, _, _ = strings.Cut(line, " | ")
				words := strings.Fields(strings.ReplaceAll(line, "'", ""))
				if len(words) < 2 || strings.TrimPrefix(words[0], "build/") != "gaiafs" {
					continue
				}
				seen++
				cmd, rest, err := newRoot().Find(words[1:])
				require.NoError(t, err, "%s: %s", page, line)
				require.NoError(t, cmd.ParseFlags(rest), "%s: %s", page, line)
			}
		}
	}
	require.Greater(t, seen, 30)
}

// docs/configuration.md has a row for each setting and no others.
func TestEverySettingIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/configuration.md")
	require.NoError(t, err)
	var documented []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z][a-z-]*)` \\|").FindAllStringSubmatch(string(text), -1) {
		if m[1] != "auto" && m[1] != "none" { // values of --gpus
			documented = append(documented, m[1])
		}
	}
	require.ElementsMatch(t, settingNames(), documented)
	for _, block := range regexp.MustCompile("(?ms)^```toml\n(.*?)^```$").FindAllStringSubmatch(string(text), -1) {
		require.NoError(t, complete(newSettings().flags(), write(t, block[1]), environment(nil)))
	}
}

// docs/configuration.md has the defaults and the words that each setting has, and other pages all rules and predictors.
func TestPagesHaveTheWordsOfSettings(t *testing.T) {
	rows := make(map[string][]string)
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z][a-z-]*)` \\| ([^|]*) \\| (.*) \\|$").
		FindAllStringSubmatch(text(t, "docs/configuration.md"), -1) {
		rows[m[1]] = m[2:]
	}
	checked := 0
	newSettings().flags().VisitAll(func(f *pflag.Flag) {
		row := rows[f.Name]
		require.Len(t, row, 2, f.Name)
		if m := regexp.MustCompile("^`([^`]*)`$").FindStringSubmatch(row[0]); m != nil {
			checked++
			require.Equal(t, m[1], f.Value.String(), "the default of %s", f.Name)
		}
		if c, is := f.Value.(*choice); is {
			for _, word := range c.among {
				require.Contains(t, row[1], "`"+word+"`", f.Name)
			}
		}
	})
	require.Greater(t, checked, 15)
	for page, words := range map[string][]string{"docs/eviction.md": policy.Names(), "docs/trace.md": prefetch.Names(),
		"docs/transfers.md": newSettings().transfers.among} {
		for _, word := range words {
			require.Contains(t, text(t, page), "`"+word+"`", page)
		}
	}
}
