package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

func text(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../..", path))
	require.NoError(t, err)
	return string(b)
}

// TestManualPages: each command has a page with each of its flags, and man(1) finds no fault in it.
func TestManualPages(t *testing.T) {
	dir := t.TempDir()
	r := gaiafsCommand(t, "manual", dir)
	require.Equal(t, exitOK, r.code, r.err)
	pages := 0
	require.NoError(t, eachCommand(newRoot(), func(c *cobra.Command) error {
		pages++
		path := filepath.Join(dir, strings.ReplaceAll(c.CommandPath(), " ", "-")+".1")
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		page := strings.ReplaceAll(string(b), `\-`, "-")
		require.NotContains(t, page, "[=false]")
		require.NotContains(t, page, "1970")
		require.Contains(t, page, c.Short)
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				require.Regexp(t, `(?m)^(\\fB-\w\\fP, )?\\fB--`+f.Name+`\\fP( \\fI\S+\\fP)?$`, page, path)
			}
		})
		if _, err := exec.LookPath("man"); err != nil {
			return nil
		}
		cmd := exec.Command("man", "--warnings", "-l", path)
		cmd.Env = append(os.Environ(), "MANPAGER=cat", "LC_ALL=C.UTF-8")
		var warnings bytes.Buffer
		cmd.Stderr = &warnings
		require.NoError(t, cmd.Run())
		require.Empty(t, warnings.String(), path)
		return nil
	}))
	written, err := filepath.Glob(filepath.Join(dir, "*.1"))
	require.NoError(t, err)
	require.Len(t, written, pages)
}

// TestOneVersion: the file VERSION, the header, the Python package, and the packages have the same version.
func TestOneVersion(t *testing.T) {
	release := strings.TrimSpace(text(t, "VERSION"))
	var major, minor, patch int
	_, err := fmt.Sscanf(release, "%d.%d.%d", &major, &minor, &patch)
	require.NoError(t, err)
	require.Contains(t, text(t, "client/c/gaiafs.h"), fmt.Sprintf("#define GAIA_VERSION %d\n",
		major*10000+minor*100+patch))
	require.Contains(t, text(t, "client/python/gaiafs/__init__.py"), fmt.Sprintf("__version__ = %q\n", release))
	require.Contains(t, text(t, "packaging/kubernetes.yaml"), "image: gaiafs:"+release+"\n")
	for _, name := range []string{"gaiafs", "libgaiafs"} {
		require.Contains(t, text(t, "packaging/"+name+".yaml"), "\nversion: ${PACKAGE_VERSION}\nversion_schema: none\n")
	}
}

// TestRelease: a release is tagged with its part of the changelog, from a clean checkout.
func TestRelease(t *testing.T) {
	version := strings.TrimSpace(text(t, "VERSION"))
	dir := t.TempDir()
	put := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755))
	}
	run := func(want string, args ...string) string {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "ARTIFACTS=", "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org",
			"GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@example.org", "GIT_CONFIG_GLOBAL=/dev/null")
		out, err := cmd.CombinedOutput()
		require.Equal(t, want == "", err == nil, "%s", out)
		require.Contains(t, string(out), want)
		return string(out)
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "packaging"), 0o755))
	put("packaging/release", text(t, "packaging/release"))
	put("VERSION", version+"\n")
	put("CHANGELOG.md", "# Changes\n\n## Unreleased\n\nNot this.\n\n## 0.0.1\n\nNor this.\n")
	put(".gitignore", "build\n")
	run("", "git", "init", "-q")
	run("", "git", "add", "-A")
	run("", "git", "commit", "-qm", "first")
	run("has no part '## "+version+"'", "packaging/release", "build/release")
	put("CHANGELOG.md", "# Changes\n\n## "+version+"\n\n### News\n\n- This.\n\n## 0.0.1\n\nNot this.\n")
	run("uncommitted changes", "packaging/release", "build/release")
	run("", "git", "commit", "-qam", "second")
	run("nothing", "env", "ARTIFACTS=nothing", "packaging/release", "build/release")
	require.Empty(t, run("", "git", "tag"), "the tag of a release that could not be made")
	run("", "packaging/release", "build/release")
	run("", "packaging/release", "build/release") // again, of the same commit
	tag := run("", "git", "tag", "-n9", "v"+version)
	require.Contains(t, tag, "### News")
	require.NotContains(t, tag, "Not this")
	notes, err := os.ReadFile(filepath.Join(dir, "build/release/NOTES.md"))
	require.NoError(t, err)
	require.Equal(t, "### News\n\n- This.\n", strings.TrimPrefix(string(notes), "\n"))
	run("", "git", "commit", "-qm", "third", "--allow-empty")
	run("of another commit", "packaging/release", "build/release")
}

// TestPackageVersions: a package that was built later upgrades an earlier one, and a release the ones before its tag.
func TestPackageVersions(t *testing.T) {
	dir := t.TempDir()
	put := func(name, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755))
	}
	at := 0
	run := func(args ...string) string {
		t.Helper()
		cmd := exec.Command(args[0], args[1:]...)
		cmd.Dir = dir
		when := fmt.Sprintf("2026-01-01T00:00:%02d", at)
		cmd.Env = append(os.Environ(), "GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@example.org", "GIT_COMMITTER_NAME=a",
			"GIT_COMMITTER_EMAIL=a@example.org", "GIT_CONFIG_GLOBAL=/dev/null", "GIT_COMMITTER_DATE="+when)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return strings.TrimSpace(string(out))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "packaging"), 0o755))
	put("packaging/version", text(t, "packaging/version"))
	put("VERSION", "1.2.3\n")
	require.Equal(t, "1.2.3", run("packaging/version"), "an archive without git")
	run("git", "init", "-q")
	run("git", "add", "-A")
	commit := func() {
		at++
		run("git", "commit", "-qm", "next", "--allow-empty")
	}
	var all []string
	version := func() { all = append(all, run("packaging/version")) }
	commit()
	version()
	require.Regexp(t, `^1\.2\.3~git20260101000001\.[0-9a-f]{8}$`, all[0])
	commit()
	version()
	run("git", "tag", "v1.2.3")
	version()
	require.Equal(t, "1.2.3", all[2])
	commit()
	version()
	commit()
	version()
	put("VERSION", "1.2.3\n\n")
	version()
	require.Regexp(t, `^1\.2\.3\+git20\d{12}\.[0-9a-f]{8}\.dirty$`, all[5])
	if _, err := exec.LookPath("dpkg"); err != nil {
		return
	}
	for i := range all[1:] {
		run("dpkg", "--compare-versions", all[i], "lt", all[i+1])
	}
}

// TestPackageRemoval: the folder of logs goes with the package, and stays during an upgrade.
func TestPackageRemoval(t *testing.T) {
	root := t.TempDir()
	logs := filepath.Join(root, "var/log/gaiafs")
	for argument, stays := range map[string]bool{"upgrade": true, "1": true, "remove": false, "purge": false, "0": false} {
		require.NoError(t, os.MkdirAll(logs, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(logs, "a.log"), nil, 0o600))
		cmd := exec.Command("../../packaging/postremove", argument)
		cmd.Env = append(os.Environ(), "DPKG_ROOT="+root)
		require.NoError(t, cmd.Run())
		_, err := os.Stat(logs)
		require.Equal(t, stays, err == nil, argument)
	}
	require.DirExists(t, filepath.Dir(logs))
}

// TestWhatTestsInstall: README names each program that make test installs, and CI runs what README says.
func TestWhatTestsInstall(t *testing.T) {
	readme := strings.Join(strings.Fields(text(t, "README.md")), " ")
	_, list, found := strings.Cut(readme, "installs the programs that tests run: ")
	require.True(t, found)
	list, _, _ = strings.Cut(list, ".")
	var named []string
	for name := range strings.SplitSeq(strings.ReplaceAll(list, "and ", ""), ", ") {
		named = append(named, name)
	}
	want := []string{"chromium-headless-shell"}
	m := regexp.MustCompile(`(?m)^test="(.*)"$`).FindStringSubmatch(text(t, ".ci/setup"))
	require.NotNil(t, m)
	for pair := range strings.FieldsSeq(m[1]) {
		_, pkg, _ := strings.Cut(pair, ":")
		want = append(want, pkg)
	}
	require.ElementsMatch(t, want, named)
	require.Contains(t, text(t, ".ci/run"), "\nmake test\n")
	for _, target := range []string{"test", "test-quick"} {
		require.Contains(t, readme, "make "+target)
		require.Regexp(t, `(?m)^`+target+`:`, text(t, "Makefile"))
	}
	limit := regexp.MustCompile(`(?m)^TEST_TIMEOUT \?= (\S+)$`).FindStringSubmatch(text(t, "Makefile"))
	require.NotNil(t, limit)
	duration, err := time.ParseDuration(limit[1])
	require.NoError(t, err)
	require.GreaterOrEqual(t, duration, time.Hour, "a slow machine")
}

// TestYAML: YAML files can be parsed, and mounts propagate to other pods.
func TestYAML(t *testing.T) {
	for _, name := range []string{"gaiafs.yaml", "libgaiafs.yaml", "kubernetes.yaml"} {
		kinds := 0
		for d := yaml.NewDecoder(strings.NewReader(text(t, "packaging/"+name))); ; kinds++ {
			var document map[string]any
			err := d.Decode(&document)
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, name)
			if document["kind"] == "DaemonSet" {
				pod := document["spec"].(map[string]any)["template"].(map[string]any)["spec"].(map[string]any)
				require.Contains(t, fmt.Sprint(pod["containers"]), "mountPropagation:Bidirectional")
				var args []string
				for _, a := range pod["containers"].([]any)[0].(map[string]any)["args"].([]any) {
					args = append(args, a.(string))
				}
				mount := newMount()
				require.NoError(t, mount.ParseFlags(args[1:]), "gaiafs mount accepts the flags")
			}
		}
		require.Positive(t, kinds, name)
	}
}

// TestMountHelperIsDocumented: the settings in its manual page exist.
func TestMountHelperIsDocumented(t *testing.T) {
	page := text(t, "packaging/mount.fuse.gaiafs.8")
	for _, m := range regexp.MustCompile(`\.BR ([a-z_]+)[= ,]`).FindAllStringSubmatch(page, -1) {
		if strings.Contains(m[1], "_") {
			require.NotNil(t, newSettings().flags().Lookup(strings.ReplaceAll(m[1], "_", "-")), m[1])
		}
	}
}
