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

// TestManualPages: each command has one, with each of its flags, and man(1) has nothing to say against it.
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
		require.Contains(t, page, c.Short)
		c.Flags().VisitAll(func(f *pflag.Flag) {
			if !f.Hidden {
				require.Contains(t, page, "--"+f.Name, path)
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

// TestOneVersion: the file VERSION, the header, the Python package, and the packages agree.
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
		require.Contains(t, text(t, "packaging/"+name+".yaml"), "\nversion: ${RELEASE}\n")
	}
}

// TestYAML: what is written in it can be read, and mounts spread to other pods.
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
				require.NoError(t, mount.ParseFlags(args[1:]), "the flags are those of gaiafs mount")
			}
		}
		require.Positive(t, kinds, name)
	}
}

// TestMountHelperIsDocumented: what its manual page says are settings are.
func TestMountHelperIsDocumented(t *testing.T) {
	page := text(t, "packaging/mount.fuse.gaiafs.8")
	for _, m := range regexp.MustCompile(`\.BR ([a-z_]+)[= ,]`).FindAllStringSubmatch(page, -1) {
		if strings.Contains(m[1], "_") {
			require.NotNil(t, newSettings().flags().Lookup(strings.ReplaceAll(m[1], "_", "-")), m[1])
		}
	}
}
