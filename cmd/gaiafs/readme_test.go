package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// example returns the only block of README.md in that language.
func example(t *testing.T, language string) string {
	t.Helper()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err)
	blocks := regexp.MustCompile("(?ms)^```"+language+"\n(.*?)^```$").FindAllStringSubmatch(string(readme), -1)
	require.Len(t, blocks, 1)
	return blocks[0][1]
}

// buildExample compiles a program of README.md and returns its path.
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

// The programs of README.md are compiled and do what it says.
func TestReadmeExamples(t *testing.T) {
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

// What README.md and docs/ point at exists.
func TestDocumentsPointAtFiles(t *testing.T) {
	documents := []string{"../../README.md", "../../CHANGELOG.md"}
	for _, folder := range []string{"docs", "docs/howto", "docs/dev", "docs/dev/adr"} {
		more, err := filepath.Glob("../../" + folder + "/*.md")
		require.NoError(t, err)
		documents = append(documents, more...)
	}
	link := regexp.MustCompile(`\]\(([^)#:]+)(?:#[^)]*)?\)`)
	program := regexp.MustCompile("(?ms)^```.*?^```$") // may have brackets before parentheses, too
	for _, name := range documents {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		for _, m := range link.FindAllStringSubmatch(program.ReplaceAllString(string(text), ""), -1) {
			_, err := os.Stat(filepath.Join(filepath.Dir(name), m[1]))
			require.NoError(t, err, "%s points at %s", name, m[1])
		}
	}
}

// The commands of the quick start and of the how-tos do what they say: the blocks with a comment that says run, in their
// order, in one folder of their own.
func TestHowTos(t *testing.T) {
	pages, err := filepath.Glob("../../docs/howto/*.md")
	require.NoError(t, err)
	block := regexp.MustCompile("(?ms)^<!-- run -->\n```sh\n(.*?)^```$")
	ran := 0
	for _, page := range append(pages, "../../docs/index.md") {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		script := ""
		for _, m := range block.FindAllStringSubmatch(string(text), -1) {
			script += m[1]
		}
		if script == "" {
			continue
		}
		ran++
		t.Run(filepath.Base(page), func(t *testing.T) {
			dir := t.TempDir()
			for _, d := range []string{"models", "data", "mnt/models", "mnt/data", "bin"} {
				require.NoError(t, os.MkdirAll(filepath.Join(dir, d), 0o755))
			}
			require.NoError(t, os.WriteFile(filepath.Join(dir, "models/model.safetensors"), make([]byte, 3*mib), 0o600))
			self, err := os.Executable()
			require.NoError(t, err)
			require.NoError(t, os.Symlink(self, filepath.Join(dir, "bin/gaiafs")))
			run := exec.Command("bash", "-eux", "-o", "pipefail", "-c", strings.ReplaceAll(script, "/mnt/", dir+"/mnt/"))
			run.Env = append(command(t).Env, "HOME="+dir, "PATH="+dir+"/bin:"+os.Getenv("PATH"), variable("gpus")+"=emulated:1",
				variable("gpu-memory")+"=16M")
			out, err := run.CombinedOutput()
			if err != nil { // leave no mount behind
				for _, name := range []string{"models", "data"} {
					_ = gaiafsCommand(t, "umount", "--force", filepath.Join(dir, "mnt", name))
				}
			}
			require.NoError(t, err, "%s", out)
		})
	}
	require.GreaterOrEqual(t, ran, 4)
}

// docs/configuration.md has a row for every setting and knows no others.
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
