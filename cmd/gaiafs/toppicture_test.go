package main

import (
	"errors"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
)

const topPicture = "../../docs/images/top.svg"

// picture draws a screen of text as SVG.
func picture(screen string) string {
	lines := strings.Split(strings.TrimRight(screen, "\n"), "\n")
	const width, line, margin = 8.4, 18, 14
	var b strings.Builder
	w, h := leastWidth*width+2*margin, len(lines)*line+2*margin
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" role="img" `+
		`font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace" font-size="14">`+"\n", w, h)
	b.WriteString("<title>gaiafs top</title>\n" + `<rect width="100%" height="100%" rx="8" fill="#14191f"/>` + "\n")
	for i, text := range lines {
		if text == "" {
			continue
		}
		// textLength aligns columns with any font.
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#d7dee6" xml:space="preserve" textLength="%.1f">%s</text>`+"\n",
			margin,
			margin+line*i+13, float64(len([]rune(text)))*width, html.EscapeString(text))
	}
	return b.String() + "</svg>\n"
}

// The picture of top in the documentation shows a mount that programs work on. It has the headings and the keys of the
// real top.
func TestTopPicture(t *testing.T) {
	heading := regexp.MustCompile(`^( {7}used .*|reads |  file .*|  program .*|gpu\d|pinned |up, .*)`)
	words := func(screen string) (all []string) { // without figures, names and maps
		for line := range strings.Lines(screen) {
			if m := heading.FindString(line); m != "" {
				all = append(all, strings.TrimSpace(m))
			}
		}
		return all
	}
	p := newPlace(t)
	r := gaiafsCommand(t, "mount", "--daemon", "--gpus=emulated:2", "--gpu-memory=64M",
		"--pinned-memory=128M", p.source, p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	in := func(name string) string { return filepath.Join(p.mountpoint, name) }
	for name, size := range map[string]int{"model-00001.safetensors": 24 * mib, "model-00002.safetensors": 18 * mib,
		"dataset.bin": 9 * mib} {
		require.NoError(t, os.WriteFile(in(name), make([]byte, size), 0o600))
	}
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", in("model-00001.safetensors")).code)
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=1", in("model-00002.safetensors")).code)
	stop := work(t, in("out.bin"))
	f, err := os.OpenFile(in("dataset.bin"), os.O_RDWR, 0)
	require.NoError(t, err)
	m, err := gaiafs.Map(f, 0, 9*mib, gaiafs.ProtRead, 0)
	require.NoError(t, err)
	look := func() topSample {
		s, err := statusOf(p.mountpoint, patience)
		require.NoError(t, err)
		s.Mount.Mountpoint = "/mnt/models"
		for i := range s.Programs {
			s.Programs[i].Name, s.Programs[i].Process = "serve", 4711
		}
		return topSample{s, time.Now()}
	}
	model, err := os.Open(in("model-00002.safetensors"))
	require.NoError(t, err)
	require.NoError(t, unix.Fadvise(int(model.Fd()), 0, 0, unix.FADV_DONTNEED)) // so that reads reach the daemon
	before := look()
	_, err = f.WriteAt(make([]byte, 3*mib), 4*mib) // makes it stale
	require.NoError(t, err)
	_, err = model.ReadAt(make([]byte, 18*mib), 0)
	require.NoError(t, err)
	require.Equal(t, exitOK, gaiafsCommand(t, "warm", "--device=0", model.Name()).code)
	now := look()
	var chosen unix.Stat_t
	require.NoError(t, unix.Stat(in("dataset.bin"), &chosen))
	screen := topModel{before: before, now: now, chosen: chosen.Ino, width: leastWidth, height: leastHeight}.screen()
	require.Contains(t, screen, "> dataset.bin")
	stop()
	require.NoError(t, errors.Join(m.Close(), f.Close(), model.Close()))
	r = gaiafsCommand(t, "umount", p.mountpoint)
	require.Equal(t, exitOK, r.code, r.err)
	if *update {
		require.NoError(t, os.WriteFile(topPicture, []byte(picture(screen)), 0o644))
	}
	written, err := os.ReadFile(topPicture)
	require.NoError(t, err)
	var shown strings.Builder
	for _, text := range regexp.MustCompile(`(?m)^<text[^>]*>(.*)</text>$`).FindAllStringSubmatch(string(written), -1) {
		shown.WriteString(html.UnescapeString(text[1]) + "\n")
	}
	require.NotEmpty(t, words(screen))
	require.Subset(t, words(shown.String()), words(screen),
		"draw it again: go test ./cmd/gaiafs -run TestTopPicture -update")
}
