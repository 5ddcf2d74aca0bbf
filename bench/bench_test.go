package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/bench/rows"
)

func TestFioRate(t *testing.T) {
	rate, err := fioRate([]byte("fio: a warning\n" +
		`{"jobs":[{"error":0,"read":{"bw_bytes":1000},"write":{"bw_bytes":24}}]}`))
	require.NoError(t, err)
	require.Equal(t, 1024.0, rate)
	for _, bad := range []string{"", "{", `{"jobs":[]}`, `{"jobs":[{"error":5,"read":{"bw_bytes":1}}]}`} {
		_, err := fioRate([]byte(bad))
		require.Error(t, err, bad)
	}
}

func TestEveryFioWorkloadHasAJobFile(t *testing.T) {
	seen := make(map[fioWork]bool)
	for _, w := range fioWorkloads(false) {
		text, err := jobFiles.ReadFile("fio/" + w.pattern + ".fio")
		require.NoError(t, err)
		require.Contains(t, string(text), "rw="+w.pattern+"\n")
		require.True(t, w.fits(&dataFile{size: fioSize}), w.String())
		require.Zero(t, fioSize%(w.block*int64(w.jobs)), "no part is left out")
		seen[w] = true
	}
	require.Len(t, seen, 2*2*4*2*3)
	for _, w := range fioWorkloads(true) {
		require.True(t, seen[w], "%v", w)
		require.True(t, w.fits(&dataFile{size: fioSizeQuick}), w.String())
	}
}

// After a row maps the file on a device, no row may follow that needs a file on no device.
func TestDeviceCachedRowsComeLast(t *testing.T) {
	for _, quick := range []bool{false, true} {
		mapped := false
		for _, w := range fioWorkloads(quick) {
			mapped = mapped || w.state == deviceCached
			require.Equal(t, mapped, w.state == deviceCached, w.String())
		}
	}
}

// sessionIn makes a session that cannot mount anything.
func sessionIn(t *testing.T, o Options) *session {
	t.Helper()
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	o.Out, o.Progress = io.Discard, io.Discard
	s, err := newSession(o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.close()) })
	return s
}

func TestFioMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	_, err := newFio(sessionIn(t, Options{}))
	require.ErrorIs(t, err, rows.ErrSkip)
	require.ErrorContains(t, err, "apt-get install fio")
}

// This machine's fio accepts the job files, also for names with a colon and a space.
func TestFioTakesTheJobFiles(t *testing.T) {
	if _, err := exec.LookPath("fio"); err != nil {
		t.Skip(fioHint)
	}
	s := sessionIn(t, Options{Quick: true})
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	d, err := s.newFile("a file: data", 2<<20, p)
	require.NoError(t, err)
	x, err := newFio(s)
	require.NoError(t, err)
	x.runtime = 10 * time.Millisecond
	for _, pattern := range fioPatterns {
		for _, st := range []state{hostWarm, cold} {
			w := fioWork{pattern, 64 << 10, 16, st}
			side := x.side(p, d, w)
			require.NoError(t, side.Prepare(t.Context()))
			rate, err := side.Measure(t.Context())
			require.NoError(t, err)
			require.Positive(t, rate)
			require.NoError(t, side.Check(t.Context()), w.String())
		}
	}
	st, err := os.Stat(p.path(d.name))
	require.NoError(t, err)
	require.EqualValues(t, 2<<20, st.Size(), "fio makes no file longer")
}

func TestWrongBytesAreFound(t *testing.T) {
	s := sessionIn(t, Options{})
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	d, err := s.newFile("file", 3<<20+5, p)
	require.NoError(t, err)
	require.NoError(t, d.checkBytes(p))
	f, err := os.OpenFile(p.path("file"), os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("x"), 3<<20)
	require.NoError(t, err)
	require.ErrorContains(t, d.checkBytes(p), "page 768 of")
	a := access{block: pageSize, jobs: 1, size: d.size, amount: d.size, verify: d.verify}
	_, err = a.run(t.Context(), p.path("file"), 1)
	require.NoError(t, err, "the page that is not whole is not read")
	_, err = f.WriteAt([]byte("x"), 1<<20)
	require.NoError(t, err)
	_, err = a.run(t.Context(), p.path("file"), 1)
	require.ErrorContains(t, err, "page 256 of file was read with bytes that the file does not have")
	require.NoError(t, f.Truncate(100))
	require.Error(t, d.checkBytes(p))
}

func TestAFileThatChangesIsNoticed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	_, err := fill(path, 2<<20)
	require.NoError(t, err)
	d, err := giveFile(path, true)
	require.NoError(t, err)
	p := &place{name: placeBacking, source: filepath.Dir(path), dir: filepath.Dir(path)}
	row := rows.Row{Group: "g", Name: "n", Sides: []rows.Side{d.reading(rows.Side{Name: "backing",
		Measure: func(context.Context) (float64, error) { return 1, nil }},
		func(context.Context) error { return d.checkBytes(p) })}}
	_, err = row.Run(t.Context(), 2, func(int, int, string) {})
	require.NoError(t, err)

	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte{1}, 0)
	require.NoError(t, err)
	require.NoError(t, f.Sync())
	_, err = row.Run(t.Context(), 2, func(int, int, string) {})
	require.ErrorIs(t, err, errChanged)
	require.ErrorContains(t, err, path)
}

func TestGivenFilesThatSayNothing(t *testing.T) {
	dir := t.TempDir()
	small := filepath.Join(dir, "small")
	require.NoError(t, os.WriteFile(small, make([]byte, 1000), 0o600))
	for path, says := range map[string]string{dir: "not a regular file", small: "1000 bytes",
		dir + "/none": "no such file"} {
		_, err := giveFile(path, false)
		require.ErrorContains(t, err, says)
	}
}

func TestColdFilesAreCold(t *testing.T) {
	s := sessionIn(t, Options{})
	if kind, _ := rows.Filesystem(s.dir); kind == "tmpfs" {
		t.Skip("nothing is cold on tmpfs")
	}
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	d, err := s.newFile("file", 4<<20, p)
	require.NoError(t, err)
	require.NoError(t, s.enter(t.Context(), hostWarm, p, d))
	share, err := inHostMemory(p.path(d.name), d.size)
	require.NoError(t, err)
	require.Equal(t, 1.0, share)
	require.NoError(t, s.enter(t.Context(), cold, p, d))
	share, err = inHostMemory(p.path(d.name), d.size)
	require.NoError(t, err)
	require.LessOrEqual(t, share, stillWarm)
}

// A file that another program maps stays in memory. The error says so.
func TestWhatCannotBeMadeColdIsSaid(t *testing.T) {
	s := sessionIn(t, Options{})
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	d, err := s.newFile("file", 4<<20, p)
	require.NoError(t, err)
	f, err := os.Open(p.path(d.name))
	require.NoError(t, err)
	defer f.Close()
	held, err := syscall.Mmap(int(f.Fd()), 0, int(d.size), syscall.PROT_READ, syscall.MAP_SHARED|syscall.MAP_POPULATE)
	require.NoError(t, err)
	defer func() { _ = syscall.Munmap(held) }()
	err = s.enter(t.Context(), cold, p, d)
	require.ErrorIs(t, err, rows.ErrSkip)
	require.ErrorContains(t, err, "cannot be made cold")
}

// onTmpfs returns a folder on a tmpfs of that many MiB.
func onTmpfs(t *testing.T, mib string) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can mount a tmpfs")
	}
	dir := t.TempDir()
	require.NoError(t, syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+mib+"m"))
	t.Cleanup(func() { require.NoError(t, syscall.Unmount(dir, 0)) })
	return dir
}

func TestNothingIsColdOnTmpfs(t *testing.T) {
	s := sessionIn(t, Options{Dir: onTmpfs(t, "64"), Quick: true})
	require.NoError(t, s.prepare(nil))
	require.Contains(t, strings.Join(s.remarks, "\n"), "is on tmpfs, where files are always in host memory")
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	d, err := s.newFile("file", 1<<20, p)
	require.NoError(t, err)
	require.ErrorIs(t, s.enter(t.Context(), cold, p, d), rows.ErrSkip)
	require.NoError(t, s.enter(t.Context(), hostWarm, p, d))
	_, err = cachedRows(t.Context(), s)
	require.ErrorContains(t, err, "choose a folder on a disk")
}

func TestNoRoom(t *testing.T) {
	dir := onTmpfs(t, "8")
	var out bytes.Buffer
	err := Run(t.Context(), Options{Dir: dir, Match: regexp.MustCompile("^fio/"), Out: &out, Progress: &out})
	require.ErrorContains(t, err, "of free space and 1.7 GiB are needed: choose another folder with --dir")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)

	s := sessionIn(t, Options{Dir: dir})
	p, err := s.place(placeBacking)
	require.NoError(t, err)
	_, err = s.newFile("file", 16<<20, p)
	require.ErrorIs(t, err, syscall.ENOSPC)
	require.ErrorContains(t, err, "there is no space left in "+dir)
}

func TestGroupsThatMatch(t *testing.T) {
	names := func(o Options, pattern string) (all []string) {
		o.Match = regexp.MustCompile(pattern)
		for _, g := range o.groups() {
			all = append(all, g.name)
		}
		return all
	}
	require.Equal(t, []string{"fio"}, names(Options{}, "^fio/.*write"))
	require.Len(t, names(Options{}, ""), len(groups)-1)
	require.Len(t, names(Options{}, "cold"), len(groups)-1)
	require.Equal(t, []string{"fio", "cached"}, names(Options{File: "x"}, ""))
	require.Equal(t, []string{modelGroup}, names(Options{Model: "x"}, ""))
	require.Equal(t, []string{"fio", "tree"}, names(Options{}, "^fio/(read|write)|^tree/git"))
	require.Len(t, names(Options{}, "^(fio/|tree/)"), len(groups)-1, "what is in parentheses is not looked into")
	require.Equal(t, []string{`a\|b`, "(c|d)", "[|]"}, alternatives(`a\|b|(c|d)|[|]`))
	for _, pattern := range []string{"^nothing/", "^merge/nothing", "nothing of the kind", "^fio/read$|^tree/git$"} {
		for _, o := range []Options{{}, {Quick: true}, {File: "missing"}} {
			o.Match, o.Dir = regexp.MustCompile(pattern), "missing" // whatever were made would say so
			err := Run(t.Context(), o)
			require.ErrorIs(t, err, ErrNoMatch)
			require.ErrorContains(t, err, "--list")
		}
	}
	var out bytes.Buffer
	require.NoError(t, List(&out))
	require.Contains(t, out.String(), "\ncached ")
}

// The names of all rows are known before anything is made for them.
func TestNamesOfRows(t *testing.T) {
	t.Chdir(t.TempDir())
	for pattern, want := range map[string][]string{
		"^merge/.*45 %":            {"merge"},
		"256 MiB":                  {"modified", "device"}, // the size with Quick
		"cold":                     {"device", "fio", "metadata", "tree", "small"},
		"lost updates":             {"sharing"},
		"--write-back$":            {"fio"},
		"randwrite.*mapped":        {"fio"},
		"50 % on a device":         {"cached"},
		"160 devices|all agree":    {"state", "versions"},
		"readdir, cold, 1 job":     {"metadata"},
		"^tree/(go build|unlink)$": {"tree"},
	} {
		o := Options{Quick: true, Match: regexp.MustCompile(pattern)}
		var names []string
		for _, g := range o.wanted(t.Context()) {
			names = append(names, g.name)
		}
		require.Equal(t, want, names, pattern)
	}
	left, err := os.ReadDir(".")
	require.NoError(t, err)
	require.Empty(t, left)
}

// Listing the names runs no program and looks for none.
func TestNamesOfRowsNeedNoPrograms(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	list, err := treeRows(t.Context(), newListing(Options{}))
	require.NoError(t, err)
	var names []string
	for _, row := range list {
		require.Empty(t, row.Skip, row.Name)
		names = append(names, row.Name)
	}
	require.Subset(t, names, []string{"git clone", "rm -r of the clone", "go build"})
}

// A quick run that names no rows has few: of loading, a second process, writing together, and CPU programs, in this
// order.
func TestRowsOfQuick(t *testing.T) {
	t.Chdir(t.TempDir())
	o := Options{Quick: true, Match: quickMatch}
	var names []string
	lines := 0
	for _, g := range o.wanted(t.Context()) {
		list, err := g.rows(t.Context(), newListing(o))
		require.NoError(t, err)
		for _, row := range list {
			if quickMatch.MatchString(row.Title()) {
				names = append(names, row.Title())
				lines += 1 + len(row.Sides) // one while it is measured, and the table
			}
		}
	}
	require.Equal(t, []string{
		"device/gaia_mmap cold, 256 MiB", "device/gaia_mmap warm, 256 MiB",
		"device/second gaia_mmap, another process, 256 MiB", "device/mrelease, 1 % of the pages changed, 256 MiB",
		"device/macquire by another device, 1 % of the pages changed, 256 MiB",
		"sharing/8192 KiB, strides of 8 B", "sharing/8192 KiB, strides of 4096 B", "sharing/lost updates",
		"fio/read 1 MiB host-warm 1 job", "fio/randread 4 KiB host-warm 1 job", "fio/write 4 KiB host-warm 1 job",
		"fio/write 1 MiB host-warm 1 job", "fio/read 1 MiB cold 1 job", "fio/randread 4 KiB cold 1 job",
		"fio/read 1 MiB device-cached 1 job", "tree/git clone", "tree/git status of the clone"}, names)
	require.Less(t, lines, 80)
}

func TestSharesOfQuickAreItsTime(t *testing.T) {
	share := 0
	for _, g := range groups {
		require.Positive(t, g.share, g.name)
		require.LessOrEqual(t, g.quickRoom, g.room, g.name)
		if g.name != modelGroup { // which runs alone
			share += g.share
		}
	}
	require.LessOrEqual(t, time.Duration(share)*time.Second, QuickTime+10*time.Second)
}

// A slow group does not use the time of later groups.
func TestEveryGroupHasItsShareOfQuick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		saved := groups
		defer func() { groups = saved }()
		slow := func(name string) func(context.Context, *session) ([]rows.Row, error) {
			return func(context.Context, *session) (list []rows.Row, err error) {
				for range 100 {
					list = append(list, rows.Row{Group: name, Name: "row", Unit: rows.Count,
						Sides: []rows.Side{{Name: "gaiafs",
							Measure: func(context.Context) (float64, error) {
								time.Sleep(5 * time.Millisecond)
								return 1, nil
							}}}})
				}
				return list, nil
			}
		}
		groups = []group{{name: "a", rows: slow("a"), share: 1}, {name: "b", rows: slow("b"), share: 1}}
		s := sessionIn(t, Options{Quick: true, Rounds: 3, Match: regexp.MustCompile("")})
		var r rows.Report
		for i := range groups {
			require.NoError(t, s.runGroup(t.Context(), &groups[i], time.Now().Add(100*time.Millisecond), &r))
		}
		count := make(map[string]int)
		for _, row := range r.Rows {
			if row.Skipped == "" {
				count[row.Group]++
			} else {
				require.Equal(t, noTime, row.Skipped)
			}
		}
		require.Len(t, r.Rows, 200)
		require.Positive(t, count["a"])
		require.Positive(t, count["b"])
		require.Less(t, count["a"], 100)
	})
}

// If the rows of a group fail or are interrupted, the rows that were measured are kept.
func TestWhatWasMeasuredIsKept(t *testing.T) {
	saved := groups
	defer func() { groups = saved }()
	measured := rows.Row{Group: "merge", Name: "good", Unit: rows.Count, Sides: []rows.Side{{Name: "gaiafs",
		Measure: func(context.Context) (float64, error) { return 1, nil }}}}
	for _, c := range []struct {
		fail func(end context.CancelFunc) error
		says string
		rows int // including the failed row and the one after it
	}{
		{func(context.CancelFunc) error { return syscall.EIO }, "rows that failed: 1", 3},
		{func(end context.CancelFunc) error { end(); return errors.New("git: signal: killed") }, "interrupted", 1},
		{func(context.CancelFunc) error { return syscall.ENOSPC }, "--dir", 1},
		{func(context.CancelFunc) error { return errors.New("git: No space left on device") }, "--dir", 1},
	} {
		ctx, end := context.WithCancel(t.Context())
		groups = []group{{name: "merge", rows: func(context.Context, *session) ([]rows.Row, error) {
			bad := rows.Row{Group: "merge", Name: "bad", Sides: []rows.Side{{Name: "gaiafs",
				Measure: func(context.Context) (float64, error) { return 0, c.fail(end) }}}}
			return []rows.Row{measured, bad, measured}, nil
		}}}
		dir, file := t.TempDir(), filepath.Join(t.TempDir(), "r.json")
		var out bytes.Buffer
		err := Run(ctx, Options{Dir: dir, JSON: file, HTML: file + ".html", Out: &out, Progress: io.Discard})
		end()
		require.ErrorContains(t, err, c.says)
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		var r rows.Report
		require.NoError(t, json.Unmarshal(text, &r))
		require.Equal(t, rows.Format, r.Format)
		require.Len(t, r.Rows, c.rows)
		require.Contains(t, out.String(), "good")
		page, err := os.ReadFile(file + ".html")
		require.NoError(t, err)
		if c.rows == 1 {
			require.Contains(t, r.Ended, c.says)
			require.Contains(t, string(page), "Not complete")
		} else {
			require.Contains(t, r.Rows[1].Failed, "input/output error")
		}
		left, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, left)
	}
}

// sample is a report with every kind of row that has a picture.
func sample() *rows.Report {
	sum := rows.Summary{Median: 2, Q1: 1, Q3: 3, Min: 1, Max: 3}
	sides := func(names ...string) (all []rows.SideResult) {
		for i, n := range names {
			s := rows.SideResult{Name: n, Values: []float64{1, 2, 3}, Summary: sum}
			if i > 0 {
				s.Ratio = &sum
			}
			all = append(all, s)
		}
		return all
	}
	r := &rows.Report{Rounds: 3, Machine: rows.Machine{Command: "gaiafs bench --run '<&>'",
		Devices: []string{"device 0"}}}
	for _, w := range fioWorkloads(false) {
		r.Rows = append(r.Rows, rows.Result{Group: "fio", Name: w.String(), Labels: w.labels(), Unit: "MB/s",
			Sides: sides(placeGaiafs, placeLoopback, placeBacking),
			Targets: []rows.TargetResult{{Target: "≥ 1× loopback", Verdict: rows.Missed, Against: placeLoopback,
				Limit: 1}}})
	}
	for _, percent := range []string{"0", "50", "100"} {
		for _, p := range cachedPatterns {
			r.Rows = append(r.Rows, rows.Result{Group: "cached", Name: p.name, Sides: sides(placeGaiafs, placeBacking),
				Labels: map[string]string{"pattern": p.name, "jobs": "16", "percent": percent}})
		}
	}
	for _, n := range []string{"1", "32", "160"} {
		r.Rows = append(r.Rows, rows.Result{Group: "versions", Name: n, Sides: sides(n+" devices", sideName(0)),
			Labels: map[string]string{"operation": "read", "mapped": "true", "devices": n}})
	}
	r.Rows = append(r.Rows, rows.Result{Group: "tree", Name: "git", Skipped: "git <is> not installed"})
	return r
}

// The page is self-contained: it is well-formed, has a picture for every curve, and loads nothing.
func TestThePageStandsAlone(t *testing.T) {
	var out bytes.Buffer
	require.NoError(t, writePage(&out, sample()))
	page := out.String()
	for _, outside := range []string{"http://", "https://", "<script", "<link", "<img", "src=", "url(", "@import"} {
		require.NotContains(t, page, outside)
	}
	require.NotContains(t, page, "<is>", "words are escaped")
	require.NotContains(t, page, "NaN")
	require.NotContains(t, page, "ZgotmplZ")
	const states, patterns, jobs = 3, 4, 2
	require.Equal(t, states*patterns*jobs+3+1+3, strings.Count(page, "<svg "), "with the ratios of three groups")
	d := xml.NewDecoder(strings.NewReader(page))
	d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	for {
		_, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
	}
}

func TestAccessTouchesEachBlockOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{1}, 1<<20), 0o600))
	for _, random := range []bool{false, true} {
		a := access{write: true, random: random, block: 4096, jobs: 3, size: 1 << 20, amount: 300 << 10}
		_, err := a.run(t.Context(), path, 2)
		require.NoError(t, err)
		text, err := os.ReadFile(path)
		require.NoError(t, err)
		require.EqualValues(t, a.bytes(), bytes.Count(text, []byte{2}))
		require.EqualValues(t, 25*4096*3, a.bytes())
		require.NoError(t, os.WriteFile(path, bytes.Repeat([]byte{1}, 1<<20), 0o600))
	}
	ctx, end := context.WithCancel(t.Context())
	end()
	_, err := (&access{block: 4096, jobs: 1, size: 1 << 20, amount: 1 << 20}).run(ctx, path, 1)
	require.ErrorIs(t, err, context.Canceled)
}

func TestPartsOfABenchAreNoCommand(t *testing.T) {
	require.ErrorContains(t, Process(nil, io.Discard), "part of 'gaiafs bench'")
	require.ErrorContains(t, Process([]string{partMap, "x"}, io.Discard), "part of 'gaiafs bench'")
	require.Error(t, Process([]string{partMap, "x", "y"}, io.Discard))
	require.Error(t, Process([]string{partLoopback, "x", "rw", "a", "b"}, io.Discard))
}
