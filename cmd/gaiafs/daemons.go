package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// If a mount was detached or its daemon does not answer, the mountpoint does not lead to the daemon. The daemon's
// socket does.

// found is a daemon that was found through its socket.
type found struct {
	control.Listener
	doc    []byte // the status as the daemon sent it
	status statusDocument
	err    error // why there is no status
}

// findDaemons asks all daemons of this user that serve or served a mountpoint. It waits at most patience for each of
// them. "" stands for all mountpoints.
func findDaemons(mountpoint string, patience time.Duration) []found {
	var all []found
	for _, l := range control.Listeners(mountpoint) {
		all = append(all, found{Listener: l})
	}
	var asked sync.WaitGroup
	for i := range all {
		asked.Go(func() {
			f := &all[i]
			if f.doc, f.err = askStatus(f.Path, patience); f.err == nil {
				f.err = json.Unmarshal(f.doc, &f.status)
			}
		})
	}
	asked.Wait()
	return all
}

// askedFor is how long to wait for daemons that the user did not name.
const askedFor = 2 * time.Second

// mounted returns the daemon of the mount that a process sees at a mountpoint. ok is false if it is not known which
// daemon that is: only root and the user who mounted can find out.
func mounted(mountpoint string, patience time.Duration) (f found, ok bool) {
	m, err := fs.MountAt(mountpoint)
	if err != nil || m.Type != fs.Type {
		return found{}, false
	}
	all := slices.DeleteFunc(findDaemons(m.Mountpoint, patience), func(f found) bool {
		s := f.status.Mount
		return f.err != nil || s.Detached || s.Mountpoint != m.Mountpoint || s.Source != m.Source
	})
	if len(all) != 1 { // none, or also one in another mount namespace
		return found{}, false
	}
	return all[0], true
}

// findByPID finds the daemon with this process ID.
func findByPID(pid int, patience time.Duration) (found, error) {
	for _, l := range control.Listeners("") {
		if l.PID == pid {
			f := found{Listener: l}
			f.status, f.err = statusOf(l.Path, patience)
			return f, nil
		}
	}
	return found{}, fmt.Errorf("process %d is no daemon of gaiafs that this user runs: 'gaiafs status' lists "+
		"this user's daemons", pid)
}

// statusOf asks for the status, through a mountpoint or a socket.
func statusOf(where string, patience time.Duration) (s statusDocument, err error) {
	doc, err := askStatus(where, patience)
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal(doc, &s)
}

// findDetached returns the daemons whose mount at a mountpoint was detached, and those that do not answer and may be
// detached.
func findDetached(mountpoint string, patience time.Duration) []found {
	return slices.DeleteFunc(findDaemons(mountpoint, patience), func(f found) bool {
		return f.err == nil && !f.status.Mount.Detached || f.err != nil && !errors.Is(f.err, errNoAnswer)
	})
}

// waiting returns how many bytes are not home yet.
func (s *statusDocument) waiting() (bytes int64) {
	for _, f := range s.Files {
		bytes += f.WaitingBytes
	}
	return bytes
}

// whyWaiting returns the first reason why bytes are not home, in parentheses, or "".
func (s *statusDocument) whyWaiting() string {
	for _, f := range s.Files {
		if f.WaitingBytes > 0 && f.Error != "" {
			return " (" + f.Error + ")"
		}
	}
	return ""
}

// earlier describes what the daemon of an earlier, detached mount still does.
func (f found) earlier() string {
	if f.err != nil {
		return fmt.Sprintf("an earlier mount here has a daemon that does not say what it does: %s",
			stuckProcess(f.PID))
	}
	text := fmt.Sprintf("an earlier mount here was detached, and %s still has %d bytes to bring to %s%s",
		daemonText(f.PID), f.status.waiting(), f.status.Mount.Source, f.status.whyWaiting())
	if f.PID != 0 {
		text += fmt.Sprintf(": see 'gaiafs status --pid %d'", f.PID)
	}
	return text
}

// tellEarlier calls tell for each daemon of an earlier mount at a mountpoint that still has work or does not answer.
func tellEarlier(mountpoint string, tell func(text string)) {
	for _, f := range findDetached(mountpoint, askedFor) {
		if f.err != nil || f.status.waiting() > 0 {
			tell(f.earlier())
		}
	}
}

// stuckProcess says what a silent process is doing, and what helps.
func stuckProcess(pid int) string {
	if pid == 0 {
		return "its process is not known here"
	}
	switch processState(pid) {
	case 'T', 't':
		return fmt.Sprintf("process %d is stopped; 'kill -CONT %d' continues it", pid, pid)
	case 'D':
		return fmt.Sprintf("process %d waits for a disk or another filesystem that does not answer", pid)
	case 0, 'Z', 'X':
		return fmt.Sprintf("process %d has just ended", pid)
	}
	return fmt.Sprintf("process %d is busy or waits for something; its log may say what", pid)
}

// processState returns the letter for the state of a process in /proc, or 0 if there is no such process.
func processState(pid int) byte {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	text := string(stat)
	if _, after, ok := strings.Cut(text[strings.LastIndexByte(text, ')')+1:], " "); ok && after != "" {
		return after[0]
	}
	return 0
}

// isStopped reports whether a daemon of the mount that contains path is stopped, or the daemon with that socket. It
// asks only the kernel.
func isStopped(path string) bool {
	mountpoint := ""
	if m, err := fs.MountOf(path); err == nil && m.Type == fs.Type {
		mountpoint = m.Mountpoint
	}
	return slices.ContainsFunc(control.Listeners(mountpoint), func(l control.Listener) bool {
		if mountpoint == "" && l.Path != path || l.PID == 0 {
			return false
		}
		state := processState(l.PID)
		return state == 'T' || state == 't'
	})
}

// silentDaemons says which daemons of the mount that contains path do not answer. It does not touch the mountpoint,
// which would block.
func silentDaemons(path string) string {
	m, err := fs.MountOf(path)
	if err != nil {
		return ""
	}
	var texts []string
	for _, f := range findDaemons(m.Mountpoint, askedFor) {
		if f.err != nil {
			texts = append(texts, stuckProcess(f.PID))
		}
	}
	return strings.Join(texts, "; ")
}

// row is one line of `gaiafs status`.
type row struct {
	Mountpoint string `json:"mountpoint"`
	Source     string `json:"source"`
	PID        int    `json:"pid"`
	// State is "mounted", "detached", "silent", "ended" or "hidden".
	State   string `json:"state"`
	Ending  string `json:"ending,omitempty"`
	Waiting int64  `json:"waiting_bytes"`
	what    string // a text for the user
}

// allMounts lists the mounts that this process sees, and the daemons of this user whose mounts it does not see.
func allMounts(patience time.Duration) ([]row, error) {
	mounts, err := fs.Mounts()
	if err != nil {
		return nil, err
	}
	sees := func(mountpoint string) bool {
		return slices.ContainsFunc(mounts, func(m fs.MountInfo) bool { return m.Mountpoint == mountpoint })
	}
	rows, served, sockets := []row{}, make(map[string]bool), make(map[string]bool)
	var elsewhere []found
	all := findDaemons("", patience)
	for _, f := range all {
		m := f.status.Mount
		switch {
		case f.err != nil:
		case !m.Detached && !sees(m.Mountpoint):
			elsewhere = append(elsewhere, f)
		default:
			rows = append(rows, rowOf(f))
			served[m.Mountpoint] = served[m.Mountpoint] || !m.Detached
			sockets[m.Socket] = true
		}
	}
	for _, f := range all {
		if f.err != nil {
			r := silentRow(f, mounts, served)
			rows = append(rows, r)
			served[r.Mountpoint] = true
		}
	}
	for _, m := range mounts {
		if !served[m.Mountpoint] {
			served[m.Mountpoint] = true
			rows = append(rows, rowAt(m, sockets, patience))
		}
	}
	for _, f := range elsewhere {
		if r := rowOf(f); !sockets[f.status.Mount.Socket] {
			r.what = "mounted in a container or another mount namespace"
			rows = append(rows, r)
		}
	}
	return rows, nil
}

// rowAt asks the daemon of a mount for its row. Sockets are those of daemons that have rows.
func rowAt(m fs.MountInfo, sockets map[string]bool, patience time.Duration) row {
	r := row{Mountpoint: m.Mountpoint, Source: m.Source}
	s, err := statusOf(m.Mountpoint, patience)
	if err == nil {
		r.PID, r.State, r.Ending, r.Waiting = s.Mount.PID, "mounted", s.Mount.Ending, s.waiting()
		r.what = r.State
		if sockets[s.Mount.Socket] {
			r.what = "also mounted here"
		}
		sockets[s.Mount.Socket] = true
		return r
	}
	r.State, r.what = stateOf(err), stateOf(err)
	switch {
	case isUnreachable(m.Mountpoint, err):
		r.State, r.what = "silent", "its control socket is not here: a container needs the folder of it"
	case r.State == "hidden":
		r.what = "of another user"
	case r.State == "silent":
		r.what = noAnswer
	case r.State == "ended":
		r.what = "its daemon has ended: mount again"
	}
	return r
}

// rowOf is the row of a daemon that answers.
func rowOf(f found) row {
	m := f.status.Mount
	r := row{m.Mountpoint, m.Source, f.PID, "mounted", m.Ending, f.status.waiting(), "mounted"}
	if m.Detached {
		r.State, r.what = "detached", "detached"
	}
	return r
}

// silentRow returns the row of a daemon that does not answer. Its socket is named after its mountpoint. If another
// daemon serves a mount there, the source of this one is unknown.
func silentRow(f found, mounts []fs.MountInfo, served map[string]bool) row {
	r := row{PID: f.PID, State: stateOf(f.err), what: stuckProcess(f.PID)}
	for _, m := range mounts {
		for n := range control.MostDaemons {
			if filepath.Base(control.DefaultSocket(m.Mountpoint, n)) != filepath.Base(f.Path) {
				continue
			}
			r.Mountpoint = m.Mountpoint
			if !served[m.Mountpoint] {
				r.Source = m.Source
			}
		}
	}
	return r
}

// noAnswer describes a daemon that does not answer, if nothing else is known.
const noAnswer = "its daemon does not answer"

// stateOf names the reason why a daemon gave no status.
func stateOf(err error) string {
	switch {
	case errors.Is(err, syscall.ENOTCONN), errors.Is(err, syscall.ECONNREFUSED):
		return "ended"
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return "hidden"
	}
	return "silent"
}

func printRows(w io.Writer, rows []row) {
	table(w, func(t io.Writer) {
		fmt.Fprintf(t, "mountpoint\tsource\tprocess\twaiting\tstate\n")
		for _, r := range rows {
			what := r.what
			if r.Ending != "" {
				what += ", ending: " + r.Ending
			}
			process := "-"
			if r.PID != 0 {
				process = fmt.Sprint(r.PID)
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\n", cmp.Or(pagecache.Printable(r.Mountpoint), "?"),
				cmp.Or(pagecache.Printable(r.Source), "?"), process, bytesText(r.Waiting), what)
		}
	})
}
