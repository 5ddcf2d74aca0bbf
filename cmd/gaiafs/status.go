package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// statusDocument is the control socket's answer to a request for the status.
type statusDocument struct {
	Mount mountStatus `json:"mount"`
	// Requests has the latencies of the kernel's requests, by kind.
	Requests map[string]pagecache.Latency `json:"requests"`
	// Programs are the processes with mappings.
	Programs []control.Program `json:"programs"`
	pagecache.Status
}

// mountStatus describes the mount itself. docs/status.md documents it.
type mountStatus struct {
	Source     string    `json:"source"`
	Mountpoint string    `json:"mountpoint"`
	Gaiafs     string    `json:"gaiafs_version"`
	PID        int       `json:"pid"`
	Started    time.Time `json:"started"`
	Socket     string    `json:"socket"`
	Devices    string    `json:"gpus"`
	ReadOnly   bool      `json:"read_only"`
	// WriteBack says that the kernel caches writes and sends them later.
	WriteBack bool `json:"write_back"`
	// Passthrough says that the kernel reads and writes files of SOURCE itself. PassthroughRefused is how often the
	// kernel refused to.
	Passthrough        bool  `json:"passthrough"`
	PassthroughRefused int64 `json:"passthrough_refused"`
	// Events says which events report changes in SOURCE. EventsLost is how often the kernel dropped events.
	Events      string `json:"source_events"`
	EventsLost  int64  `json:"source_events_lost"`
	DeviceReads string `json:"device_reads"`
	// Settings are the live settings. Changed names those that `gaiafs set` has changed.
	Settings map[string]string `json:"settings"`
	Changed  []string          `json:"settings_changed,omitempty"`
	// Metrics is the address where metrics and the live page are served, empty without --metrics.
	Metrics string `json:"metrics,omitempty"`
	// Clients is the number of connections of the helper library, including this one. Mappings is the number of their
	// mappings.
	Clients  int `json:"clients"`
	Mappings int `json:"mappings"`
	// Detached says that the mount is no longer at its mountpoint. Ending is why the daemon ends, if it does. GivesUp
	// is when it discards bytes that home does not accept.
	Detached bool       `json:"detached"`
	Ending   string     `json:"ending,omitempty"`
	GivesUp  *time.Time `json:"gives_up,omitempty"`
}

func (s *service) status() statusDocument {
	c := s.control.Stats()
	document := statusDocument{
		Mount: mountStatus{
			Source:      s.plan.source,
			Mountpoint:  s.plan.mountpoint,
			Gaiafs:      version,
			PID:         os.Getpid(),
			Started:     s.started.UTC().Truncate(time.Millisecond),
			Socket:      s.control.Socket(),
			Devices:     s.plan.gpus.String(),
			ReadOnly:    s.plan.readOnly,
			Events:      fs.EventsOff,
			DeviceReads: s.plan.deviceReads.word,
			Clients:     c.Sessions,
			Mappings:    c.Mappings,
		},
		Requests: map[string]pagecache.Latency{},
		Programs: s.control.Programs(),
		Status:   s.cache.Status(),
	}
	document.Mount.Settings, document.Mount.Changed = s.describeSettings()
	s.end.describe(&document.Mount)
	if s.monitor != nil {
		document.Mount.Metrics = s.monitor.Address()
	}
	if mount := s.inService.Load(); mount != nil {
		document.Mount.WriteBack = mount.WriteBack()
		document.Mount.Passthrough, document.Mount.PassthroughRefused = mount.Passthrough(), mount.PassthroughRefused()
		for i := range document.Files {
			document.Files[i].Inode = mount.Inode(document.Files[i].ID)
		}
		document.Mount.Events, document.Mount.EventsLost = mount.Events(), mount.EventsLost()
		document.Requests = mount.Requests()
	}
	return document
}

// shownTo removes what the viewer may not see: the names of files that others map, which may be in directories that the
// viewer cannot read, whose the other users' views are, and the other users' programs, tenants and pins.
func (s statusDocument) shownTo(v control.Viewer) statusDocument {
	s.Files, s.Losses, s.Devices = slices.Clone(s.Files), slices.Clone(s.Losses), slices.Clone(s.Devices)
	for i := range s.Files {
		if f := &s.Files[i]; !v.Knows(f.ID) {
			f.Name = "[" + f.ID.String() + "]"
			f.PinnedBy = 0
		}
		s.Files[i].Views = viewsFor(s.Files[i].Views, v)
	}
	for i, l := range s.Losses {
		if !v.Knows(l.ID) {
			hidden := *l
			hidden.File = "[" + l.ID.String() + "]"
			s.Losses[i] = &hidden
		}
	}
	s.Programs = slices.DeleteFunc(slices.Clone(s.Programs),
		func(p control.Program) bool { return !v.All && p.User != v.User })
	others := func(a pagecache.Account) bool { return !v.All && string(a.Tenant) != pagecache.TenantOf(v.User) }
	s.PinnedTenants = slices.DeleteFunc(slices.Clone(s.PinnedTenants), others)
	for i := range s.Devices {
		s.Devices[i].Tenants = slices.DeleteFunc(slices.Clone(s.Devices[i].Tenants), others)
		s.Devices[i].Pins = slices.DeleteFunc(slices.Clone(s.Devices[i].Pins),
			func(u pagecache.UserPins) bool { return !v.All && u.User != v.User })
		s.Devices[i].Users = slices.DeleteFunc(slices.Clone(s.Devices[i].Users),
			func(u pagecache.UserPins) bool { return !v.All && u.User != v.User })
	}
	return s
}

// viewsFor returns views as the viewer may see them: without the users of other users' views, and how these are made.
func viewsFor(views []pagecache.ViewStatus, v control.Viewer) []pagecache.ViewStatus {
	shown := slices.Clone(views) // the page cache keeps its own
	for i := range shown {
		if !v.All && shown[i].User != v.User {
			shown[i].User, shown[i].Segments, shown[i].HostBytes = stranger.User, 0, 0
		}
	}
	return shown
}

func newStatus() *cobra.Command {
	q := statusQuery{timeout: span{Duration: patience, min: time.Millisecond}}
	cmd := &cobra.Command{
		Use:   "status [MOUNTPOINT]",
		Short: "List mounts, or show devices, files and counters of one",
		Long: `status lists the mounts of gaiafs. For a named mount, it shows what is on which device. Pages are 4 KiB. It leaves out what is
zero, and all but 50 of the files that no program maps, unless --all is given. --json prints a stable document for scripts, which docs/status.md describes.

A detached mount (umount -l) may have a daemon that still writes bytes home. The list includes such daemons. MOUNTPOINT shows one
while nothing else is mounted there; --pid always does.`,
		Example: `  gaiafs status
  gaiafs status /mnt/data
  gaiafs status --json /mnt/data | jq '.counters.merged_pages'`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 || q.pid != 0 {
				return arguments()(cmd, args)
			}
			if len(args) > 1 {
				return usagef("%s takes one MOUNTPOINT, or none; %s given", commandName(cmd), were(len(args)))
			}
			return nil
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 && q.pid == 0 {
				return q.showMounts(cmd.OutOrStdout())
			}
			return q.show(cmd, args)
		},
	}
	cmd.Flags().BoolVar(&q.asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&q.all, "all", false, "also show what is zero, and all files")
	cmd.Flags().IntVar(&q.pid, "pid", 0, "show the daemon with process ID `PID`")
	cmd.Flags().Var(&q.timeout, "timeout", "how long to wait for a daemon's answer")
	return cmd
}

// statusQuery holds the options of one status command.
type statusQuery struct {
	asJSON, all bool
	pid         int
	timeout     span
}

func (q *statusQuery) showMounts(out io.Writer) error {
	rows, err := allMounts(min(q.timeout.Duration, askedFor))
	if err != nil {
		return err
	}
	if q.asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(rows)
	}
	printRows(out, rows)
	return nil
}

func (q *statusQuery) show(cmd *cobra.Command, args []string) error {
	doc, err := q.ask(cmd, args)
	if err != nil {
		return err
	}
	out := cmd.OutOrStdout()
	if q.asJSON {
		var b bytes.Buffer
		if err := json.Indent(&b, doc, "", "  "); err != nil {
			return fmt.Errorf("the mount's answer cannot be read: %w", err)
		}
		b.WriteByte('\n')
		_, err := b.WriteTo(out)
		return err
	}
	var s statusDocument
	if err := json.Unmarshal(doc, &s); err != nil {
		return fmt.Errorf("the mount's answer cannot be read: %w; its daemon may be of another version", err)
	}
	return s.print(out, q.all)
}

// ask asks the daemon that the command line names.
func (q *statusQuery) ask(cmd *cobra.Command, args []string) ([]byte, error) {
	if q.pid != 0 {
		f, err := findByPID(q.pid, q.timeout.Duration)
		if err != nil {
			return nil, err
		}
		if f.err != nil {
			return nil, fmt.Errorf("process %d: %w: %s", q.pid, f.err, stuckProcess(q.pid))
		}
		return askStatus(f.Path, q.timeout.Duration)
	}
	doc, err := askDaemon(args[0], q.timeout.Duration)
	if !isNoMount(err) {
		if err != nil {
			return nil, statusError(args[0], err)
		}
		tellEarlier(resolve(args[0]), func(text string) { fmt.Fprintln(cmd.ErrOrStderr(), "gaiafs:", text) })
		return doc, nil
	}
	switch detached := findDetached(resolve(args[0]), q.timeout.Duration); len(detached) {
	case 0:
		return nil, statusError(args[0], err)
	case 1:
		f := detached[0]
		if f.err != nil {
			return nil, fmt.Errorf("nothing is mounted at %s. %s", args[0], f.earlier())
		}
		return askStatus(f.Path, q.timeout.Duration)
	default:
		return nil, severalDetached(args[0], detached)
	}
}

// isNoMount reports whether an error says that gaiafs has nothing mounted there.
func isNoMount(err error) bool {
	return errors.Is(err, syscall.ENOTTY) || errors.Is(err, syscall.EINVAL)
}

// severalDetached returns the error for a mountpoint at which several daemons had their mounts.
func severalDetached(mountpoint string, all []found) error {
	var b strings.Builder
	fmt.Fprintf(&b, "nothing is mounted at %s, but several daemons still run for mounts that were there: choose one with "+
		"--pid\n", mountpoint)
	for i, f := range all {
		if i > 0 {
			b.WriteByte('\n')
		}
		b.WriteString("  " + f.earlier())
	}
	return errors.New(b.String())
}

// errNoAnswer says that a daemon exists but does not answer.
var errNoAnswer = errors.New("the daemon does not answer")

// askStatus asks the daemon for its status, through a mountpoint or a socket.
func askStatus(where string, patience time.Duration) ([]byte, error) {
	return within(where, patience, func() ([]byte, error) { return statusFrom(where) })
}

// askDaemon is askStatus for commands that do not use the files of the mount. A mountpoint cannot be opened while
// SOURCE does not answer, so askDaemon prefers the daemon's socket.
func askDaemon(where string, patience time.Duration) ([]byte, error) {
	return within(where, patience, func() ([]byte, error) {
		if f, ok := mounted(where, min(patience, askedFor)); ok {
			return f.doc, nil
		}
		return statusFrom(where)
	})
}

// patience is how long commands without a timeout setting wait for a daemon's answer.
const patience = 10 * time.Second

// stoppedAfter is how often to check whether a silent daemon is stopped.
const stoppedAfter = time.Second

// within returns the result of call, which asks the daemon of the mount that contains path, or the daemon with that
// socket. The daemon may be stopped or hang, and no signal would end a call that waits for it. After limit the call is
// abandoned, and ends with this process. within gives up early if the daemon is stopped.
func within[T any](path string, limit time.Duration, call func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	answered := make(chan answer, 1)
	go func() {
		value, err := call()
		answered <- answer{value, err}
	}()
	late := time.After(limit)
	look := time.NewTicker(max(min(stoppedAfter, limit), time.Millisecond)) // it panics for 0
	defer look.Stop()
	var none T
	for {
		select {
		case a := <-answered:
			return a.value, a.err
		case <-late:
			return none, fmt.Errorf("%w after %s", errNoAnswer, limit)
		case <-look.C:
			if isStopped(path) {
				return none, errNoAnswer
			}
		}
	}
}

// statusError says what to do about a mount that does not answer.
func statusError(mountpoint string, err error) error {
	switch {
	case errors.Is(err, errNoAnswer):
		what := cmp.Or(silentDaemons(mountpoint), "it is waiting for something, or is stopped")
		return fmt.Errorf("%s: %w: %s. Wait longer with --timeout, or give up the mount with 'gaiafs umount --force "+
			"%s'",
			mountpoint, err, what, mountpoint)
	case isNoMount(err), errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%s is not a mountpoint of gaiafs: 'gaiafs status' lists the mounts",
			mountpoint)
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("%s does not exist: check the spelling", mountpoint)
	case isUnreachable(mountpoint, err):
		return fmt.Errorf("the daemon of %s runs, but there is no way to ask it from here: a container needs the folder of "+
			"its control socket, which is /run/gaiafs if root mounted", mountpoint)
	case errors.Is(err, syscall.ENOTCONN), errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.ECONNABORTED):
		m, at := fs.MountOf(mountpoint)
		if at != nil || m.Type != fs.Type {
			return fmt.Errorf("the daemon of %s has ended", mountpoint)
		}
		return hasEnded(m)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s belongs to another user: run this as that user, or mount it with --allow-other", mountpoint)
	}
	return err
}

// hasEnded returns the error for a mount whose daemon has ended, and says what to do.
func hasEnded(m fs.MountInfo) error {
	return fmt.Errorf("the daemon of %[1]s has ended: 'gaiafs mount %[2]s %[1]s' mounts again, also while programs have "+
		"files of the old mount open, which get errors; 'gaiafs umount %[1]s' only removes the mount", m.Mountpoint,
		m.Source)
}

// isUnreachable reports whether err means that the daemon of a mount runs, but its socket is not in this mount
// namespace.
func isUnreachable(mountpoint string, err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) && unix.Statfs(mountpoint, new(unix.Statfs_t)) == nil
}
