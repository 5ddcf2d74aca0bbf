package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

// block returns the only block of a page that contains a text.
func block(t *testing.T, page, containing string) string {
	t.Helper()
	var found []string
	for _, m := range regexp.MustCompile("(?ms)^```[a-z]*\n(.*?)^```$").FindAllStringSubmatch(text(t, page), -1) {
		if strings.Contains(m[1], containing) {
			found = append(found, m[1])
		}
	}
	require.Len(t, found, 1, "%s: %s", page, containing)
	return found[0]
}

// sized replaces what a test cannot have: places, much memory, a fixed port.
func sized(p place) *strings.Replacer {
	return strings.NewReplacer("/srv/models", p.source, "/mnt/models", p.mountpoint, "16G", "32M", ":9400", ":0")
}

// The line for /etc/fstab in docs/install.md mounts, as mount(8) passes it on, and umount(8) takes the mount away.
func TestFstabLineOfThePage(t *testing.T) {
	p := newPlace(t)
	fields := strings.Fields(sized(p).Replace(block(t, "docs/install.md", "fuse.gaiafs")))
	require.Len(t, fields, 6, "fstab(5)")
	require.Equal(t, []string{p.source, p.mountpoint, "fuse.gaiafs"}, fields[:3])
	self, err := os.Executable()
	require.NoError(t, err)
	helper := func(name string, args ...string) {
		t.Helper()
		path := filepath.Join(filepath.Dir(p.log), name)
		require.NoError(t, os.Symlink(self, path))
		cmd := command(t)
		cmd.Path, cmd.Args = path, append([]string{path}, args...)
		cmd.Env = append(cmd.Env, variable("gpus")+"=emulated:1")
		r := execute(t, cmd)
		require.Equal(t, exitOK, r.code, "%s %v: %s", name, args, r.err)
	}
	helper("mount.fuse.gaiafs", fields[0], fields[1], "-o", fields[3]) // mount(8), "External helpers"
	require.NoError(t, os.WriteFile(filepath.Join(p.mountpoint, "a"), []byte("a"), 0o600))
	helper("umount.fuse.gaiafs", fields[1])
	require.FileExists(t, filepath.Join(p.source, "a"))
}

// The service mounts with the settings of the file that docs/install.md shows.
func TestServiceOfThePage(t *testing.T) {
	unit := text(t, "packaging/gaiafs@.service")
	start := regexp.MustCompile(`(?m)^ExecStart=@PREFIX@/bin/gaiafs mount -- \$\{SOURCE\} \$\{MOUNTPOINT\}$`)
	require.Regexp(t, start, unit)
	require.Contains(t, unit, "\nEnvironmentFile=/etc/gaiafs/%i.conf\n", "the page names /etc/gaiafs/models.conf")
	require.Contains(t, unit, "\nTimeoutStopSec=5min\n", "the page says for how long it stops")
	p := newPlace(t)
	settings := strings.Fields(sized(p).Replace(block(t, "docs/install.md", "MOUNTPOINT=")))
	values := make(map[string]string)
	for _, s := range settings {
		name, value, found := strings.Cut(s, "=")
		require.True(t, found, s)
		values[name] = value
	}
	cmd := command(t, "mount", "--daemon", "--", values["SOURCE"], values["MOUNTPOINT"])
	cmd.Env = append(append(cmd.Env, settings...), variable("gpus")+"=emulated:1")
	r := execute(t, cmd)
	require.Equal(t, exitOK, r.code, r.err)
	require.Empty(t, r.err, "each variable is a setting")
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
	t.Run("systemd reads it", func(t *testing.T) {
		if _, err := exec.LookPath("systemd-analyze"); err != nil {
			t.Skip("systemd-analyze is missing")
		}
		dir := t.TempDir()
		require.NoError(t, os.Mkdir(filepath.Join(dir, "bin"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "bin/gaiafs"), []byte("#!/bin/sh\n"), 0o755))
		name := filepath.Join(dir, "gaiafs@models.service")
		require.NoError(t, os.WriteFile(name, []byte(strings.ReplaceAll(unit, "@PREFIX@", dir)), 0o600))
		out, err := exec.Command("systemd-analyze", "verify", "--man=no", name).CombinedOutput()
		if err != nil && !strings.Contains(string(out), name) && !strings.Contains(string(out), "gaiafs@") {
			t.Skipf("systemd-analyze does not work here: %v: %s", err, out)
		}
		require.NoError(t, err, "%s", out)
		require.NotContains(t, string(out), "gaiafs@", "systemd warns of nothing")
	})
}

// Make has every target that a page names, and leaves the files where the pages say.
func TestPagesNameTargets(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip("make is missing")
	}
	plan := func(target string) string {
		out, err := exec.Command("make", "-C", "../..", "--dry-run", target).CombinedOutput()
		require.NoError(t, err, "make %s: %s", target, out)
		return string(out)
	}
	rules := text(t, "Makefile")
	for _, m := range regexp.MustCompile(`(?m)^include (\S+)$`).FindAllStringSubmatch(rules, -1) {
		rules += text(t, m[1])
	}
	pages, err := filepath.Glob("../../docs/*.md")
	require.NoError(t, err)
	howTos, err := filepath.Glob("../../docs/howto/*.md")
	require.NoError(t, err)
	seen := make(map[string]bool)
	for _, page := range append(append(pages, howTos...), "../../README.md") {
		b, err := os.ReadFile(page)
		require.NoError(t, err)
		// Code within a line, and the blocks of commands.
		code := regexp.MustCompile("(?m)^```sh\n(?s:.*?)^```$|`[^`\n]+`").FindAllString(string(b), -1)
		for _, m := range regexp.MustCompile("(?m)(?:^|`|&& |# or: )make ([a-z][a-z-]*)").
			FindAllStringSubmatch(strings.Join(code, "\n"), -1) {
			seen[m[1]] = true
			require.True(t, regexp.MustCompile(`(?m)^(\S+ )*`+m[1]+`( \S+)*:`).MatchString(rules), "%s: make %s", page, m[1])
		}
	}
	for _, target := range []string{"build", "install", "uninstall", "deb", "rpm", "wheel", "image", "release", "demo"} {
		require.True(t, seen[target], "no page names make %s, or this test does not find it", target)
	}
	require.Regexp(t, `build/packages/gaiafs-[0-9.]+\.image\.tar`, plan("image"))
	require.Contains(t, plan("deb"), "build/packages")
	require.Contains(t, plan("wheel"), "build/wheel")
}

// docs/howto/containers.md says what a program in a container needs. Here the container is a mount namespace.
func TestContainersOfThePage(t *testing.T) {
	page := text(t, "docs/howto/containers.md")
	require.Contains(t, page, "-v /mnt:/mnt:rslave")
	require.Contains(t, page, "-v /run/gaiafs:/run/gaiafs")
	if os.Geteuid() != 0 {
		t.Skip("a mount namespace with its own mounts needs root")
	}
	if _, err := exec.LookPath("unshare"); err != nil {
		t.Skip("unshare is missing")
	}
	p := newPlace(t)
	shared := filepath.Dir(p.mountpoint)
	require.NoError(t, unix.Mount(shared, shared, "", unix.MS_BIND, ""))
	t.Cleanup(func() { require.NoError(t, unix.Unmount(shared, 0)) })
	require.NoError(t, unix.Mount("", shared, "", unix.MS_SHARED, ""))
	require.NoError(t, os.WriteFile(filepath.Join(p.source, "a"), make([]byte, mib), 0o600))

	self, err := os.Executable()
	require.NoError(t, err)
	inside := exec.Command("unshare", "--mount", "--propagation", "slave", "bash", "-eux", "-o", "pipefail", "-c", `
		`+withoutMounts("")+`
		read mounted
		mount -t tmpfs none `+fmt.Sprintf("%q", socketFolder(t))+`
		! "$0" warm "$1/a"
		! "$0" status "$1"
		"$0" status
		umount `+fmt.Sprintf("%q", socketFolder(t))+`
		"$0" warm "$1/a"
		"$0" info "$1/a"`, self, p.mountpoint)
	inside.Env = command(t).Env
	mounted, err := inside.StdinPipe()
	require.NoError(t, err)
	var out strings.Builder
	inside.Stdout, inside.Stderr = &out, &out
	require.NoError(t, inside.Start()) // before there is a mount
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=emulated:1", "--gpu-memory=32M", p.source, p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	fmt.Fprintln(mounted, "now")
	err = inside.Wait()
	require.Equal(t, exitOK, gaiafsCommand(t, "umount", p.mountpoint).code)
	require.NoError(t, err, out.String())
	require.Contains(t, out.String(), "runs, but there is no way to ask it from here: a container needs the folder")
	require.Contains(t, out.String(), "its control socket is not here: a container needs the folder of it")
	require.Contains(t, out.String(), "a: 1.0 MiB on gpu0")
	require.NotContains(t, out.String(), "has ended")
}

// socketFolder returns the folder of the control sockets.
func socketFolder(t *testing.T) string {
	t.Helper()
	const folder = "/run/gaiafs"
	var st syscall.Stat_t
	require.NoError(t, syscall.Stat(folder, &st), "the page says that the sockets of root are there")
	return folder
}

// docs/howto/serve.md quotes messages and names of the loaders as they are, and the versions that make test-engines has.
func TestServePage(t *testing.T) {
	page := text(t, "docs/howto/serve.md")
	var source strings.Builder
	files, err := filepath.Glob("../../client/python/integrations/gaiafs_engines/*.py")
	require.NoError(t, err)
	for _, name := range files {
		b, err := os.ReadFile(name)
		require.NoError(t, err)
		source.Write(b)
	}
	// Python joins literals that follow each other.
	words := regexp.MustCompile(`"\s*\n\s*f?"`).ReplaceAllString(source.String(), "")
	quoted := regexp.MustCompile("(?m)^\\| `([^`]*)`").FindAllStringSubmatch(page, -1)
	require.GreaterOrEqual(t, len(quoted), 4)
	figures := regexp.MustCompile(`\d+`)
	logged := strings.TrimSpace(block(t, "docs/howto/serve.md", "are shared with other processes"))
	for _, message := range append(quoted, []string{"", figures.ReplaceAllString(logged, "%d")}) {
		for part := range strings.SplitSeq(strings.ReplaceAll(message[1], "vllm", "…"), "…") {
			require.Contains(t, words, strings.TrimSpace(part), message[1])
		}
	}
	engines := regexp.MustCompile(`(?m)^ENGINES := vllm==(\S+) sglang==(\S+)$`).FindStringSubmatch(text(t, "Makefile"))
	require.NotNil(t, engines)
	require.Contains(t, page, "vLLM "+engines[1]+" and SGLang "+engines[2]+".")
	require.Contains(t, words, "\nclass GaiafsModelLoader(")
	require.Contains(t, page, "from gaiafs_engines.sglang_loader import GaiafsModelLoader\n")
	points := text(t, "client/python/integrations/pyproject.toml")
	for _, engine := range []string{"vllm.general_plugins", "sglang.srt.plugins"} {
		require.Contains(t, points, "[project.entry-points.\""+engine+"\"]\ngaiafs = ")
	}
}
