package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/pagecache"
)

// statusDocument is what the control socket answers a request for the status with.
type statusDocument struct {
	Mount mountStatus `json:"mount"`
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
	// WriteBack says that the kernel keeps writes and sends them later.
	WriteBack bool `json:"write_back"`
	// Passthrough says that the kernel reads and writes files of SOURCE itself, PassthroughRefused how often it would not.
	Passthrough        bool   `json:"passthrough"`
	PassthroughRefused int64  `json:"passthrough_refused"`
	PeerReads          string `json:"peer_reads"`
	// Clients is the number of connections of the helper library, this one included, Mappings what they map.
	Clients  int `json:"clients"`
	Mappings int `json:"mappings"`
}

func (s *service) status() statusDocument {
	c := s.control.Stats()
	document := statusDocument{
		Mount: mountStatus{
			Source:     s.plan.source,
			Mountpoint: s.plan.mountpoint,
			Gaiafs:     version,
			PID:        os.Getpid(),
			Started:    s.started.UTC().Truncate(time.Millisecond),
			Socket:     s.control.Socket(),
			Devices:    s.plan.gpus.String(),
			ReadOnly:   s.plan.readOnly,
			PeerReads:  s.plan.peerReads.word,
			Clients:    c.Sessions,
			Mappings:   c.Mappings,
		},
		Status: s.cache.Status(),
	}
	if mount := s.inService.Load(); mount != nil {
		document.Mount.WriteBack = mount.WriteBack()
		document.Mount.Passthrough, document.Mount.PassthroughRefused = mount.Passthrough(), mount.PassthroughRefused()
	}
	return document
}

// shownTo leaves out what the viewer may not know: the names of files that others map, which may be in directories that she may
// not read, and what else other users map.
func (s statusDocument) shownTo(v control.Viewer) statusDocument {
	for i := range s.Files {
		if f := &s.Files[i]; !v.Knows(f.ID) {
			f.Name = "[" + f.ID.String() + "]"
		}
	}
	for i, l := range s.Losses {
		if !v.Knows(l.ID) {
			hidden := *l
			hidden.File = "[" + l.ID.String() + "]"
			s.Losses[i] = &hidden
		}
	}
	for i := range s.Devices {
		s.Devices[i].Users = slices.DeleteFunc(s.Devices[i].Users, func(u pagecache.UserPins) bool { return !v.All && u.User != v.User })
	}
	return s
}

func newStatus() *cobra.Command {
	var asJSON bool
	timeout := span{Duration: 10 * time.Second}
	cmd := &cobra.Command{
		Use:   "status MOUNTPOINT",
		Short: "Show devices, files and counters of a mount",
		Long: `status shows what a mount holds where. Pages are of 4 KiB. With --json it prints a stable document for scripts, which
docs/status.md describes.`,
		Example: `  gaiafs status /mnt/data
  gaiafs status --json /mnt/data | jq '.counters.merged_pages'`,
		Args: arguments("MOUNTPOINT"),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			doc, err := askStatus(args[0], timeout.Duration)
			if err != nil {
				return statusError(args[0], err)
			}
			out := cmd.OutOrStdout()
			if asJSON {
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
			return s.print(out)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().Var(&timeout, "timeout", "how long to wait for the daemon's answer")
	return cmd
}

// errNoAnswer says that a daemon is there and says nothing.
var errNoAnswer = errors.New("the daemon does not answer")

// askStatus asks the daemon. It may be stopped, or hang, and a signal would not end the call that waits for it.
func askStatus(mountpoint string, patience time.Duration) ([]byte, error) {
	type answer struct {
		doc []byte
		err error
	}
	answered := make(chan answer, 1)
	go func() {
		doc, err := gaiafs.Status(mountpoint)
		answered <- answer{doc, err}
	}()
	select {
	case a := <-answered:
		return a.doc, a.err
	case <-time.After(patience):
		return nil, fmt.Errorf("%w after %s", errNoAnswer, patience)
	}
}

// statusError says what to do about a mount that does not answer.
func statusError(mountpoint string, err error) error {
	switch {
	case errors.Is(err, errNoAnswer):
		return fmt.Errorf("%s: %w: it is stopped, or waits for something; see its log, wait longer with --timeout, or give it up with "+
			"'gaiafs umount --force %s'", mountpoint, err, mountpoint)
	case errors.Is(err, syscall.ENOTTY), errors.Is(err, syscall.EINVAL), errors.Is(err, syscall.ENOTDIR):
		return fmt.Errorf("%s is not a mountpoint of gaiafs: 'findmnt -t fuse.gaiafs' lists those there are", mountpoint)
	case errors.Is(err, syscall.ENOENT):
		return fmt.Errorf("%s does not exist: check the spelling", mountpoint)
	case errors.Is(err, syscall.ENOTCONN), errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("the daemon of %s has ended: unmount it with 'gaiafs umount %s' and mount it again", mountpoint, mountpoint)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("%s belongs to another user: ask as that user, or mount it with --allow-other", mountpoint)
	}
	return err
}
