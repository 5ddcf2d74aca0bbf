package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// tellManager tells the service manager something, if one started this process (sd_notify(3)).
func (s *service) tellManager(state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		s.log.Warn("the service manager does not listen", "error", err)
	}
}

// watched tells the service manager until ctx ends that the daemon lives, where it wants to know. A file whose backing
// filesystem hangs, or a program that does not answer, is no reason to end the daemon: it is asked for its status,
// which waits for neither.
func (s *service) watched(ctx context.Context) {
	interval, err := sd.SdWatchdogEnabled(false)
	if err != nil || interval == 0 {
		return
	}
	tick := time.NewTicker(interval / 3)
	defer tick.Stop()
	for {
		s.status()
		s.tellManager(sd.SdNotifyWatchdog)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// readyForManager says that the mount can be used.
func (s *service) readyForManager(ready string) {
	s.tellManager(fmt.Sprintf("%s\nSTATUS=%s", sd.SdNotifyReady, strings.ReplaceAll(ready, "\n", " ")))
}

// stopping says that the daemon ends, and why.
func stopping(cause string) string {
	return fmt.Sprintf("%s\nSTATUS=ending: %s", sd.SdNotifyStopping, cause)
}
