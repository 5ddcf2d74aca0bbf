package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
)

// tellManager sends a state to the service manager, if one started this process (sd_notify(3)).
func (s *service) tellManager(state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		s.log.Warn("the service manager cannot be reached", "error", err)
	}
}

// watched tells the service manager until ctx ends that the daemon is alive, if the manager asks for that. A backing
// filesystem that hangs, or a program that does not answer, is no reason to end the daemon. So the test of life is the
// daemon's status, which waits for neither.
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

// readyForManager tells the service manager that the mount is usable.
func (s *service) readyForManager(ready string) {
	s.tellManager(fmt.Sprintf("%s\nSTATUS=%s", sd.SdNotifyReady, strings.ReplaceAll(ready, "\n", " ")))
}

// stopping returns the state that says why the daemon ends.
func stopping(cause string) string {
	return fmt.Sprintf("%s\nSTATUS=ending: %s", sd.SdNotifyStopping, cause)
}
