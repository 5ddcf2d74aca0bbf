package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/fs"
)

func newUmount() *cobra.Command {
	u := unmounting{timeout: span{Duration: time.Minute}}
	cmd := &cobra.Command{
		Use:     "umount MOUNTPOINT",
		Aliases: []string{"unmount"},
		Short:   "Write everything back, unmount, and wait until the daemon has ended",
		Long: `umount makes the daemon write home what devices hold, unmounts, and returns when the daemon has ended.

It refuses while SOURCE does not accept all bytes, because it is full or fails: it says how many bytes of which files are waiting, and
why, and the mount goes on. The daemon keeps the bytes and retries, so they arrive soon after there is free space. umount also
refuses while programs use the mount, and names them.

With --force, bytes that SOURCE does not accept are discarded and named, and the exit code is 1.

The daemon of a detached mount (umount -l) may still be writing bytes home. umount MOUNTPOINT waits for that daemon while nothing
else is mounted there; --pid always names it.`,
		Example: `  gaiafs umount /mnt/data
  gaiafs umount --timeout 10m /mnt/data    # wait longer for a slow disk
  gaiafs umount --force /mnt/data          # discard what SOURCE does not accept`,
		Args: func(cmd *cobra.Command, args []string) error {
			if u.process != 0 {
				return arguments()(cmd, args)
			}
			return arguments("MOUNTPOINT")(cmd, args)
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				u.mountpoint = args[0]
			}
			return u.run()
		},
	}
	cmd.Flags().Var(&u.timeout, "timeout",
		"how long to wait for bytes on their way and for the daemon to end; 0 does not wait for its end")
	cmd.Flags().IntVar(&u.process, "pid", 0, "end the mount of the daemon with process ID `PID`")
	cmd.Flags().BoolVar(&u.force, "force", false,
		"discard bytes that SOURCE does not accept, and unmount even if the daemon does not answer")
	return cmd
}

// mountpoints lists the mountpoints of gaiafs, for completion.
func mountpoints() []string {
	mounts, err := fs.Mounts()
	if err != nil {
		return nil
	}
	var paths []string
	for _, m := range mounts {
		paths = append(paths, m.Mountpoint)
	}
	return paths
}

// unmounting holds the options and the state of one umount.
type unmounting struct {
	mountpoint string
	process    int // the value of --pid, or 0
	timeout    span
	force      bool
	mount      fs.MountInfo
	// detached is the daemon of a detached mount, which is reached through its socket. It is nil if the mount is at its
	// mountpoint.
	detached *found
}

// hiddenPause is the longest pause before umount tries again. It tries again only if no process is seen to use the
// mount: a call such as statfs, or a loop device that was unmounted a moment ago, uses it only for a moment. So does
// another command of gaiafs.
const hiddenPause = 320 * time.Millisecond

// errHeld says that the daemon itself keeps the mount busy, because bytes have begun to wait.
var errHeld = errors.New("the daemon holds the mount")

func (u *unmounting) run() error {
	if err := u.choose(); err != nil {
		return err
	}
	ctx := context.Background()
	if u.timeout.Duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, u.timeout.Duration, fmt.Errorf("after %s", u.timeout.Duration))
		defer cancel()
	}
	for {
		err := u.end(ctx)
		if !errors.Is(err, errHeld) {
			return err
		}
		// A program released bytes after the daemon checked. The daemon checks again.
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s is not unmounted: programs keep releasing bytes to it; end them, and try again",
				u.mountpoint)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// choose finds the mount to unmount, or the daemon of a detached mount that is to end.
func (u *unmounting) choose() (err error) {
	if u.process != 0 {
		f, err := findByPID(u.process, askedFor)
		switch {
		case err != nil:
			return err
		case f.err != nil:
			return fmt.Errorf("process %d: %w: %s", u.process, f.err, stuckProcess(u.process))
		}
		u.mountpoint = f.status.Mount.Mountpoint
		if f.status.Mount.Detached {
			u.detached = &f
			return nil
		}
	}
	u.mount, err = fs.MountAt(u.mountpoint)
	if err == nil && u.mount.Type == fs.Type {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotMounted) {
		return err
	}
	switch detached := findDetached(resolve(u.mountpoint), askedFor); len(detached) {
	case 0:
		return fs.NotOurs(u.mountpoint)
	case 1:
		u.detached = &detached[0]
		return nil
	default:
		return severalDetached(u.mountpoint, detached)
	}
}

// where returns the path through which the daemon is asked.
func (u *unmounting) where() string {
	if u.detached != nil {
		return u.detached.Path
	}
	return u.mountpoint
}

// remains and isGone return the beginnings of sentences about a mount that stays, and one that is gone.
func (u *unmounting) remains() string {
	if u.detached != nil {
		return fmt.Sprintf("the mount at %s was detached, and %s goes on", u.mountpoint, daemonText(u.detached.PID))
	}
	return u.mountpoint + " is not unmounted"
}

func (u *unmounting) isGone() string {
	if u.detached != nil {
		return fmt.Sprintf("the mount at %s was detached before", u.mountpoint)
	}
	return u.mountpoint + " is unmounted"
}

// state returns the beginning of a sentence about a mount whose daemon has ended.
func (u *unmounting) state() string {
	if u.detached != nil {
		return u.isGone()
	}
	return u.remains()
}

// end makes the daemon bring everything home, unmounts, and waits for the daemon's final result.
func (u *unmounting) end(ctx context.Context) error {
	d, err := u.find(ctx)
	if u.cameLate(err) {
		return u.late()
	}
	if err != nil {
		return u.withoutDaemon(err)
	}
	defer d.close()
	answered, unmounted := false, false
	last, err := gaiafs.End(ctx, u.where(), u.force, func(text []byte) (bool, error) {
		answered = true
		if err := u.takeAway(text, d); err != nil {
			return false, err
		}
		unmounted = true
		if u.timeout.Duration == 0 {
			return false, nil
		}
		return true, u.lookElsewhere(d)
	})
	switch {
	case !unmounted && u.cameLate(err):
		return u.late()
	case !unmounted && errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s: only root and the user who mounted it may do that", u.remains())
	case !unmounted && errors.Is(err, syscall.ECANCELED):
		return fmt.Errorf("%s: bytes are still on their way to SOURCE after %s; wait longer with --timeout, and see "+
			"'gaiafs status --pid %d'",
			u.remains(), u.timeout.Duration, d.pid)
	case !unmounted && errors.Is(err, syscall.ENOSYS):
		return fmt.Errorf("%s: its daemon's version is too old to say whether everything is written back; "+
			"unmount it with umount(8), and see its log", u.remains())
	case !answered && u.hasEnded(err, d.pid):
		return fmt.Errorf("%s: %s ended before it said whether everything is written back: see its log",
			u.state(), d)
	case errors.Is(err, syscall.ECANCELED):
		return fmt.Errorf("%s, but %s has not ended after %s: it goes on, and its log says what it waits for",
			u.isGone(), d, u.timeout.Duration)
	case unmounted && isCutOff(err):
		return fmt.Errorf("%s, but %s ended without saying whether everything is written back: see its log",
			u.isGone(), d)
	case err != nil || last == nil:
		return err
	}
	var word endDocument
	if err := json.Unmarshal(last, &word); err != nil || word.State != endOver {
		return fmt.Errorf("%s, but the final answer of %s cannot be read: see its log", u.isGone(), d)
	}
	if err := d.wait(ctx); err != nil {
		return fmt.Errorf("%s and written back, but %s has not ended: %w", u.isGone(), d, err)
	}
	if word.Error != "" {
		return fmt.Errorf("%s, and bytes are lost: %s", u.isGone(), word.Error)
	}
	return nil
}

// cameLate reports whether err means that another program unmounted meanwhile: the mountpoint is an ordinary directory.
func (u *unmounting) cameLate(err error) bool {
	if err == nil || u.detached != nil {
		return false
	}
	is, at := fs.IsMount(u.mountpoint)
	return at == nil && !is
}

func (u *unmounting) late() error {
	return fmt.Errorf("%s has just been unmounted by another program", u.mountpoint)
}

// takeAway unmounts if the daemon's first answer allows it.
func (u *unmounting) takeAway(text []byte, d *daemon) error {
	var answer endDocument
	if err := json.Unmarshal(text, &answer); err != nil {
		return fmt.Errorf("the answer of %s cannot be read: %w", d, err)
	}
	if answer.State != endReady {
		return u.refused(answer, d)
	}
	if answer.Detached {
		return nil
	}
	for pause := 5 * time.Millisecond; ; pause *= 2 {
		err := fs.Unmount(u.mountpoint)
		switch {
		case errors.Is(err, syscall.EPERM) && os.Geteuid() == 0:
			return fmt.Errorf("%s: root may not unmount in this container; unmount it where it was mounted", u.remains())
		case !errors.Is(err, syscall.EBUSY):
			return err
		}
		users, held := without(usersOf(u.mount.Mountpoint), d.pid)
		switch {
		case len(users) == 0 && held:
			return errHeld
		case pause > hiddenPause || slices.ContainsFunc(users, func(w user) bool { return !w.isBrief() }):
			return u.busy(users)
		}
		time.Sleep(pause)
	}
}

// refused returns an error that lists what is waiting.
func (u *unmounting) refused(answer endDocument, d *daemon) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s: SOURCE does not accept bytes that devices released\n", u.remains())
	for _, w := range answer.Waiting {
		fmt.Fprintf(&b, "  %s\n", w)
	}
	if answer.Ending != "" {
		name := d.String()
		fmt.Fprintf(&b, "%s is already ending (%s), and ends when SOURCE has them.\n",
			strings.ToUpper(name[:1])+name[1:], answer.Ending)
	}
	b.WriteString("They are kept and retried: free some space, or mend what is wrong, and then unmount. --force " +
		"discards them.")
	return errors.New(b.String())
}

func (u *unmounting) busy(users []user) error {
	if isUnmountHelper(os.Args[0]) { // umount(8) runs in its caller's working directory
		users = slices.DeleteFunc(users, func(w user) bool {
			return w.pid == os.Getppid() && w.what == "working directory"
		})
	}
	return fmt.Errorf("%s is in use by %s: %s, and try again", u.mountpoint, describe(users), cure(users))
}

// cure says what to do about the users of a mount.
func cure(users []user) string {
	switch {
	case len(users) > 0 && users[0].loop:
		return "detach it with 'losetup -d'"
	case len(users) > 0 && users[0].pid == 0:
		return "unmount it"
	case len(users) > 1:
		return "end them"
	}
	return "end it"
}

// withoutDaemon unmounts if the daemon does not answer, for the reason why. Nobody can ask then what the daemon still
// has.
func (u *unmounting) withoutDaemon(why error) error {
	dead := errors.Is(why, syscall.ENOTCONN) ||
		u.detached != nil && u.hasEnded(why, u.detached.PID)
	refused := errors.Is(why, syscall.EPERM) || errors.Is(why, syscall.EACCES)
	switch {
	case u.detached != nil && dead: // it ended a moment ago
		return fmt.Errorf("%s: its daemon ended before it said whether everything is written back: see its log",
			u.isGone())
	case u.detached != nil:
		kill := "SIGKILL"
		if u.detached.PID != 0 {
			kill = fmt.Sprintf("'kill -KILL %d'", u.detached.PID)
		}
		return fmt.Errorf("%s: it does not say whether everything is written back (%w). Only %s ends it then, and what "+
			"is not written back is lost", u.remains(), why, kill)
	case refused && os.Geteuid() != 0:
		return fmt.Errorf("%s is not unmounted: only root and the user who mounted it may do that", u.mountpoint)
	case refused && !u.force: // the kernel denies root access to the mounts of users
		return fmt.Errorf("%s is not unmounted: it belongs to another user and has no --allow-other, so its daemon "+
			"cannot be asked whether everything is written back; unmount it as that user, or use "+
			"--force", u.mountpoint)
	case !dead && !u.force:
		return fmt.Errorf("%s is not unmounted: its daemon does not say whether everything is written back (%w); "+
			"--force unmounts anyway",
			u.mountpoint, why)
	}
	err := fs.Unmount(u.mountpoint)
	if errors.Is(err, syscall.EBUSY) {
		if !u.force {
			users := usersOf(u.mount.Mountpoint)
			return fmt.Errorf("the daemon of %s has ended, and the mount is still in use by %s, though every access "+
				"fails: %s and try again, or detach the mount at once with 'gaiafs umount --force %s', which loses "+
				"nothing more", u.mountpoint, describe(users), cure(users), u.mountpoint)
		}
		err = detach(u.mount.Mountpoint)
	}
	switch {
	case err != nil:
		return err
	case dead:
		return fmt.Errorf("%s is unmounted, but its daemon had ended without unmounting: bytes that devices released in its "+
			"last seconds may be lost; see its log", u.mountpoint)
	}
	return fmt.Errorf("%s is unmounted, but nobody knows whether everything was written back: %w", u.mountpoint,
		errno(why))
}

// hasEnded reports whether err means that the daemon ended instead of answering. The daemon of a detached mount may be
// about to end; hasEnded waits a moment for that. pid is 0 if its process cannot be seen.
func (u *unmounting) hasEnded(err error, pid int) bool {
	return err != nil && (isCutOff(err) || u.detached != nil && pid != 0 && endsWithin(pid, time.Second))
}

// endsWithin reports whether a process ends within patience.
func endsWithin(pid int, patience time.Duration) bool {
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		switch processState(pid) {
		case 0, 'Z', 'X':
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// isCutOff reports whether the daemon or the connection to it is gone.
func isCutOff(err error) bool {
	return errors.Is(err, syscall.ENOTCONN) || errors.Is(err, syscall.ECONNREFUSED) ||
		errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.ENOENT) // a daemon that ends removes its socket
}

// lookElsewhere returns an error if the filesystem is unmounted here but still mounted elsewhere, so that the daemon
// goes on. Otherwise the daemon ends within a moment.
func (u *unmounting) lookElsewhere(d *daemon) error {
	if u.detached != nil {
		return nil // already known
	}
	users := mountedElsewhere(u.mount.Device, u.mount.Source)
	if len(users) == 0 {
		return nil
	}
	return fmt.Errorf("%s is unmounted here, and everything that was released is written back; but %s goes on, "+
		"because the filesystem is also used by %s: unmount it there too", u.mountpoint, d, describe(users))
}

// daemon is the process behind a mount. It holds a descriptor of the process, so that the PID cannot be reused. Without
// one, pid is 0 and fd is -1: the process is not in this PID namespace.
type daemon struct {
	pid, fd int
}

func (d *daemon) String() string { return daemonText(d.pid) }

// daemonText names a daemon by its process ID. 0 stands for one in a container whose processes cannot be seen.
func daemonText(pid int) string {
	if pid == 0 {
		return "the daemon in its container"
	}
	return processText(pid)
}

// resolve returns the absolute path without symbolic links, as far as possible.
func resolve(path string) string {
	if m, err := fs.MountAt(path); err == nil {
		return m.Mountpoint
	}
	if absolute, err := filepath.Abs(path); err == nil {
		path = absolute
	}
	if resolved, err := filepath.EvalSymlinks(path); err == nil {
		return resolved
	}
	// stat(2) fails on a mountpoint whose daemon has ended.
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}

// findDaemon asks the mount for its daemon. It fails with ENOTCONN if the daemon has ended.
func findDaemon(mountpoint string) (*daemon, error) {
	pid, err := daemonPID(mountpoint)
	if err != nil {
		return nil, err
	}
	if pid == 0 {
		return &daemon{0, -1}, nil
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	// The daemon still answers, so the PID was its own when the descriptor was opened.
	if again, err := daemonPID(mountpoint); err != nil || again != pid {
		unix.Close(fd)
		return nil, errors.Join(fmt.Errorf("process %d has just ended", pid), err)
	}
	return &daemon{pid, fd}, nil
}

// daemonPID asks a mount for its daemon's process ID, which is 0 if the process is not in this PID namespace.
func daemonPID(mountpoint string) (int, error) {
	doc, err := statusFrom(mountpoint)
	if err != nil {
		return 0, err
	}
	var s struct {
		Mount mountStatus `json:"mount"`
	}
	if err := json.Unmarshal(doc, &s); err != nil {
		return 0, err
	}
	return s.Mount.PID, nil
}

func (d *daemon) close() {
	if d.fd >= 0 {
		unix.Close(d.fd)
	}
}

// find finds the daemon. It waits for its answer no longer than ctx.
func (u *unmounting) find(ctx context.Context) (*daemon, error) {
	patience := time.Duration(math.MaxInt64)
	if deadline, limited := ctx.Deadline(); limited {
		patience = max(time.Until(deadline), time.Millisecond)
	}
	d, err := within(u.where(), patience, func() (*daemon, error) { return findDaemon(u.where()) })
	if !errors.Is(err, errNoAnswer) {
		return d, err
	}
	what := "it does not answer"
	if u.detached != nil {
		what += ": " + stuckProcess(u.detached.PID)
	} else if silent := silentDaemons(u.mountpoint); silent != "" {
		what += ": " + silent
	}
	return nil, errors.New(what)
}

// wait waits for the end of the process or of ctx. It does not wait for a process that it cannot see.
func (d *daemon) wait(ctx context.Context) error {
	for d.fd >= 0 {
		patience := -1
		if deadline, limited := ctx.Deadline(); limited {
			patience = int(max(time.Until(deadline), 0).Milliseconds())
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(d.fd), Events: unix.POLLIN}}, patience)
		switch {
		case errors.Is(err, syscall.EINTR):
		case err != nil:
			return err
		case n == 0:
			return errors.New("it still runs")
		default:
			return nil
		}
	}
	return nil
}
