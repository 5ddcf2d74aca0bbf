package stress

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

// startWithDevices mounts, and has a crew of writers share a file of the mount for as long as the test does something
// else. The function that it returns ends them and checks what they left.
func startWithDevices(t *testing.T, o testmount.Options) (m *testmount.Mount, end func()) {
	t.Helper()
	o.Devices = 2
	o.AllowOther = true
	m = testmount.Start(t, o)
	require.NoError(t, os.Chmod(m.Dir, 0o755))
	seed := uint64(time.Now().UnixNano())
	c := startCrew(t, m.Path("shared"), seed, 20*time.Millisecond)
	return m, func() {
		t.Helper()
		c.stop()
		content := mustRead(t, m.Path("shared"))
		kept, _ := c.verify(t, content, nil)
		require.Positive(t, kept)
		sameEverywhere(t, m, "shared", content)
		m.Stop()
	}
}

// killGroup is SIGKILL for a command and everything it started.
func killGroup(cmd *exec.Cmd) error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }

// command prepares a program in a process group of its own.
func command(dir, name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

// TestGit makes and clones a repository, also one whose commits were killed again and again.
func TestGit(t *testing.T) {
	requireTool(t, "git")
	allModes(t, func(t *testing.T, o testmount.Options) {
		m, end := startWithDevices(t, o)
		repo := m.Path("repo")
		git := func(args ...string) []string {
			return append([]string{"-C", repo, "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "gc.auto=0",
				"-c", "core.fsync=all"}, args...)
		}
		require.NoError(t, os.Mkdir(repo, 0o755))
		run(t, m.Dir, "git", "init", "-q", repo)
		for i := range 300 {
			require.NoError(t, os.WriteFile(filepath.Join(repo, fmt.Sprint("file", i)), pattern(100+i*37, byte(i)),
				0o600))
		}
		run(t, m.Dir, "git", git("add", ".")...)
		run(t, m.Dir, "git", git("commit", "-qm", "first")...)
		for i := range 5 {
			require.NoError(t, os.WriteFile(filepath.Join(repo, fmt.Sprint("file", i)), pattern(50_000, byte(i)+100),
				0o600))
			cmd := command(m.Dir, "git", git("commit", "-qam", fmt.Sprint("killed ", i))...)
			require.NoError(t, cmd.Start())
			<-time.After(time.Duration(2+3*i) * time.Millisecond) // somewhere in the middle
			_ = killGroup(cmd)
			_ = cmd.Wait()
			locks, err := filepath.Glob(filepath.Join(repo, ".git", "*.lock"))
			require.NoError(t, err)
			branches, err := filepath.Glob(filepath.Join(repo, ".git", "refs", "heads", "*.lock"))
			require.NoError(t, err)
			for _, lock := range slices.Concat(locks, branches) {
				require.NoError(t, os.Remove(lock)) // as git says
			}
		}
		run(t, m.Dir, "git", git("commit", "-q", "--allow-empty", "-am", "last")...)
		run(t, m.Dir, "git", git("gc", "-q")...)
		run(t, m.Dir, "git", git("fsck", "--full", "--strict")...)
		run(t, m.Dir, "git", "clone", "-q", "--no-local", repo, m.Path("clone"))
		require.Equal(t, run(t, m.Dir, "git", git("rev-parse", "HEAD^{tree}")...),
			run(t, m.Path("clone"), "git", "rev-parse", "HEAD^{tree}"))
		require.Empty(t, run(t, m.Path("clone"), "git", "status", "--porcelain"))
		end()
		require.Empty(t, run(t, filepath.Join(m.Source, "clone"), "git", "status", "--porcelain"),
			"in SOURCE, without the mount")
	})
}

// TestGoBuild builds a program with source and build cache on the mount, once killed in the middle.
func TestGoBuild(t *testing.T) {
	requireTool(t, "go")
	bothModes(t, func(t *testing.T, o testmount.Options) {
		m, end := startWithDevices(t, o)
		dir := m.Path("hello")
		require.NoError(t, os.Mkdir(dir, 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "go.mod"), []byte("module hello\n\ngo 1.21\n"), 0o600))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "main.go"),
			[]byte("package main\n\nimport \"strconv\"\n\nfunc main() { println(strconv.Quote(\"built\")) }\n"), 0o600))
		build := func() *exec.Cmd {
			cmd := command(dir, "go", "build", "-o", "hello", ".")
			cmd.Env = append(os.Environ(), "GOCACHE="+m.Path("gocache"), "GOFLAGS=-mod=mod", "GOTOOLCHAIN=local",
				"CGO_ENABLED=0", "TMPDIR="+m.Dir)
			return cmd
		}
		killed := build()
		require.NoError(t, killed.Start())
		<-time.After(700 * time.Millisecond) // somewhere in the middle
		_ = killGroup(killed)
		_ = killed.Wait()
		out, err := build().CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Equal(t, "\"built\"\n", run(t, dir, "./hello"))
		end()
		require.Equal(t, "\"built\"\n", run(t, m.Source, "./hello/hello"), "in SOURCE, without the mount")
	})
}

// TestSQLite has two processes write a database in WAL mode, and kills one of them now and then. What was committed is
// there.
func TestSQLite(t *testing.T) {
	sqlite := requireTool(t, "sqlite3")
	allModes(t, func(t *testing.T, o testmount.Options) {
		m, end := startWithDevices(t, o)
		db := m.Path("data.db")
		require.Equal(t, "wal\n", run(t, m.Dir, sqlite, db,
			"PRAGMA journal_mode=WAL; CREATE TABLE t(who INT, n INT, text TEXT, PRIMARY KEY(who, n));"))
		// writer inserts numbers in transactions of their own and prints each that is committed.
		writer := func(who, from, to int) (*exec.Cmd, func() int) {
			var script strings.Builder
			fmt.Fprintf(&script, ".timeout 30000\nPRAGMA synchronous=FULL;\n")
			for n := from; n < to; n++ {
				fmt.Fprintf(&script, "BEGIN IMMEDIATE; INSERT INTO t VALUES(%d, %d, hex(randomblob(200))); COMMIT; SELECT %d;\n", who, n, n)
			}
			cmd := command(m.Dir, sqlite, "-batch", "-bail", db)
			cmd.Stdin = strings.NewReader(script.String())
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			lines := bufio.NewScanner(out)
			return cmd, func() int {
				if !lines.Scan() {
					return -1
				}
				n, err := strconv.Atoi(lines.Text())
				require.NoError(t, err)
				return n
			}
		}
		steady, next := writer(1, 0, 200)
		last, killed := -1, 0
		for round := range 5 {
			victim, committed := writer(2, last+1, last+1000)
			for range 5 + 4*round {
				last = max(last, committed())
			}
			require.NoError(t, killGroup(victim))
			for n := committed(); n >= 0; n = committed() {
				last = max(last, n)
			}
			require.Error(t, victim.Wait())
			killed++
			// What was committed but not printed is there too, perhaps.
			out := run(t, m.Dir, sqlite, "-cmd", ".timeout 30000", db, "SELECT count(*), max(n) FROM t WHERE who = 2;")
			var count, most int
			_, err := fmt.Sscanf(out, "%d|%d", &count, &most)
			require.NoError(t, err, out)
			require.Equal(t, most+1, count)
			require.GreaterOrEqual(t, most, last)
			last = most
		}
		seen := -1
		for n := next(); n >= 0; n = next() {
			seen = n
		}
		require.NoError(t, steady.Wait())
		require.Equal(t, 199, seen)
		check := "PRAGMA integrity_check; SELECT count(*) FROM t WHERE who = 1; SELECT count(*) FROM t WHERE who = 2;"
		want := fmt.Sprintf("ok\n200\n%d\n", last+1)
		require.Equal(t, want, run(t, m.Dir, sqlite, db, check))
		end()
		require.Equal(t, want, run(t, m.Source, sqlite, filepath.Join(m.Source, "data.db"), check),
			"in SOURCE, without the mount")
	})
}

// postgres is a PostgreSQL cluster on the mount, run as the user of that name.
type postgres struct {
	t         *testing.T
	bin, data string
	run       string // for the socket
	server    *exec.Cmd
	ids       syscall.Credential
}

func newPostgres(t *testing.T, m *testmount.Mount) *postgres {
	t.Helper()
	found, _ := filepath.Glob("/usr/lib/postgresql/*/bin")
	if len(found) == 0 {
		missing(t, "PostgreSQL")
	}
	u, err := user.Lookup("postgres")
	if err != nil || os.Geteuid() != 0 {
		missing(t, "the user postgres, or the right to become it")
	}
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	require.NoError(t, err)
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	require.NoError(t, err)
	p := &postgres{t: t, bin: found[len(found)-1], data: m.Path("pg"), run: t.TempDir(),
		ids: syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	for dir := p.run; dir != os.TempDir(); dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	for _, dir := range []string{filepath.Dir(m.Dir), filepath.Dir(filepath.Dir(m.Dir)), m.Source} {
		require.NoError(t, os.Chmod(dir, 0o755))
	}
	require.NoError(t, os.Mkdir(p.data, 0o700))
	require.NoError(t, os.Chown(p.data, int(uid), int(gid)))
	require.NoError(t, os.Chown(p.run, int(uid), int(gid)))
	return p
}

func (p *postgres) command(name string, args ...string) *exec.Cmd {
	cmd := command(p.run, filepath.Join(p.bin, name), args...)
	cmd.SysProcAttr.Credential = &p.ids
	cmd.Env = append(os.Environ(), "LC_ALL=C", "PGHOST="+p.run, "PGUSER=postgres", "PGDATABASE=postgres", "HOME="+p.run)
	return cmd
}

func (p *postgres) do(name string, args ...string) string {
	p.t.Helper()
	out, err := p.command(name, args...).CombinedOutput()
	require.NoError(p.t, err, "%s: %s", name, out)
	return string(out)
}

func (p *postgres) query(sql string) string {
	p.t.Helper()
	return strings.TrimSpace(p.do("psql", "-X", "-A", "-t", "-q", "-v", "ON_ERROR_STOP=1", "-c", sql))
}

// start starts the server and waits until it answers.
func (p *postgres) start() {
	p.t.Helper()
	p.server = p.command("postgres", "-D", p.data, "-k", p.run, "-c", "listen_addresses=", "-c", "shared_buffers=16MB",
		"-c", "max_wal_size=64MB", "-c", "checkpoint_timeout=30s", "-c", "logging_collector=off")
	log, err := os.OpenFile(filepath.Join(p.run, "log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	require.NoError(p.t, err)
	defer log.Close()
	p.server.Stdout, p.server.Stderr = log, log
	require.NoError(p.t, p.server.Start())
	eventually(p.t, func() error {
		err := p.command("pg_isready", "-q").Run()
		if err != nil {
			said, _ := os.ReadFile(log.Name())
			err = fmt.Errorf("%w: %s", err, said)
		}
		return err
	})
}

// kill is SIGKILL for the postmaster alone; its children notice, sooner or later.
func (p *postgres) kill() {
	p.t.Helper()
	_ = p.server.Process.Kill()
	_ = p.server.Wait()
}

// alone waits until no process of the cluster is left. They all work in its directory.
func (p *postgres) alone() {
	p.t.Helper()
	eventually(p.t, func() error {
		places, err := filepath.Glob("/proc/[0-9]*/cwd")
		require.NoError(p.t, err)
		for _, place := range places {
			if dir, err := os.Readlink(place); err == nil && dir == p.data {
				return fmt.Errorf("%s is of the cluster", place)
			}
		}
		return nil
	})
}

// TestPostgreSQL runs pgbench, kills the postmaster in the middle of it, and checks that the database recovers to a
// consistent state with everything that was committed.
func TestPostgreSQL(t *testing.T) {
	const kills = 1 // a recovery takes half of the test's time
	bothModes(t, func(t *testing.T, o testmount.Options) {
		m, end := startWithDevices(t, o)
		p := newPostgres(t, m)
		t.Cleanup(func() {
			if p.server != nil {
				p.kill()
				p.alone()
			}
		})
		p.do("initdb", "-D", p.data, "-A", "trust", "--data-checksums", "-N")
		p.start()
		p.do("pgbench", "-i", "-q", "-s", "1")
		p.query("CREATE TABLE mine(n INT PRIMARY KEY)")
		for round := range kills {
			bench := p.command("pgbench", "-n", "-c", "4", "-T", "60")
			require.NoError(t, bench.Start())
			for n := range 20 {
				p.query(fmt.Sprintf("INSERT INTO mine VALUES(%d)", round*20+n))
			}
			p.kill()
			_ = killGroup(bench)
			_ = bench.Wait()
			p.alone()
			p.start()
			assert.Equal(t, strconv.Itoa((round+1)*20), p.query("SELECT count(*) FROM mine"))
		}
		// Every transaction of pgbench changes an account, a teller and a branch by the same amount, and notes it.
		sums := p.query("SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(tbalance) FROM pgbench_tellers), " +
			"(SELECT sum(bbalance) FROM pgbench_branches), (SELECT coalesce(sum(delta), 0) FROM pgbench_history)")
		parts := strings.Split(sums, "|")
		require.Len(t, parts, 4)
		for _, s := range parts {
			assert.Equal(t, parts[0], s, sums)
		}
		transactions, err := strconv.Atoi(p.query("SELECT count(*) FROM pgbench_history"))
		require.NoError(t, err)
		require.Positive(t, transactions)
		t.Logf("%d transactions", transactions)
		p.query("CHECKPOINT")
		require.NoError(t, p.server.Process.Signal(syscall.SIGINT)) // a fast shutdown
		require.NoError(t, p.server.Wait())
		p.do("pg_checksums", "--check", "-D", p.data)
		end()
		p.server = nil
		p.data = filepath.Join(m.Source, "pg")
		p.do("pg_checksums", "--check", "-D", p.data)
	})
}
