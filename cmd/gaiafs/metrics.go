package main

import (
	"math"
	"os"
	"path/filepath"

	"github.com/gaiafs/gaiafs/cmd/gaiafs/monitor"
	"github.com/gaiafs/gaiafs/control"
)

// checkMetrics checks --metrics and --metrics-token-file.
func (m *mountPlan) checkMetrics() (err error) {
	if m.metricsToken != "" {
		if m.metrics == "" {
			return usagef("--metrics-token-file has no effect without --metrics")
		}
		if m.metricsToken, err = filepath.Abs(m.metricsToken); err != nil {
			return err
		}
	}
	if m.metrics == "" {
		return nil
	}
	_, loopback, err := monitor.Address(m.metrics)
	if err != nil {
		return usagef("--metrics: %w", err)
	}
	if !loopback && m.metricsToken == "" {
		return usagef("--metrics %s can be reached from other machines: protect it with --metrics-token-file, or "+
			"serve this machine only, at 127.0.0.1:PORT", m.metrics)
	}
	return nil
}

// stranger is the viewer behind a request without a token: any user of this machine.
var stranger = control.Viewer{User: math.MaxUint32}

// listenMetrics serves metrics at the address of --metrics. It returns nil if there is none.
func (s *service) listenMetrics() (*monitor.Server, error) {
	if s.plan.metrics == "" {
		return nil, nil
	}
	address, _, err := monitor.Address(s.plan.metrics)
	if err != nil {
		return nil, err
	}
	o := monitor.Options{Address: address, Snapshot: s.snapshot, Log: s.log}
	if s.plan.metricsToken != "" {
		if o.Token, err = monitor.ReadToken(s.plan.metricsToken); err != nil {
			return nil, err
		}
		if info, err := os.Stat(s.plan.metricsToken); err == nil && info.Mode().Perm()&0o077 != 0 {
			s.log.Warn("other users may read or change the token file, and with the token they see names of files; run "+
				"chmod 600 on it", "file", s.plan.metricsToken)
		}
	}
	return monitor.Listen(o)
}

func (s *service) closeMetrics() {
	if s.monitor != nil {
		s.monitor.Close()
	}
}

// snapshot returns the status for package monitor. It has names of files only if a token is required.
func (s *service) snapshot() monitor.Snapshot {
	document := s.status()
	shown := document
	if s.plan.metricsToken == "" {
		shown = document.shownTo(stranger)
	}
	return monitor.Snapshot{
		Version:  version,
		Started:  s.started,
		Sessions: document.Mount.Clients,
		Mappings: document.Mount.Mappings,
		Requests: document.Requests,
		Status:   document.Status,
		Document: shown,
	}
}
