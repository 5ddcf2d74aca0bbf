package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/pflag"

	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
)

// Settings that `gaiafs set` changes while the mount is in use.

// liveSetting is one such setting.
type liveSetting struct {
	name string // of the flag
	// check says why the value cannot be set now. nil: any value that the flag accepts is fine.
	check func(s *service, next *settings) error
	// apply makes the value effective. It may block until memory is free.
	apply func(ctx context.Context, s *service, next *settings) error
	// note returns a remark on the value for the user, or "". nil: there is never one.
	note func(s *service) string
}

// liveSettings are in the order in which they are shown.
var liveSettings = []liveSetting{
	{name: "gpu-memory", check: checkBudget, note: budgetNote,
		apply: func(ctx context.Context, s *service, next *settings) error {
			if next.gpuMemory.size == 0 {
				s.cache.SetLiveBudget()
				return nil
			}
			return s.cache.SetBudget(ctx, int64(next.gpuMemory.size), "gaiafs set")
		}},
	{name: "pinned-memory",
		apply: func(ctx context.Context, s *service, next *settings) error {
			return s.cache.SetPinnedMemory(ctx, int64(next.pinnedMemory))
		}},
	{name: "user-share",
		apply: func(_ context.Context, s *service, next *settings) error {
			return s.cache.SetUserShare(float64(next.userShare) / 100)
		}},
	{name: "tenants",
		check: func(s *service, next *settings) error { return s.cache.CheckTenants(next.tenants.list) },
		apply: func(_ context.Context, s *service, next *settings) error {
			return s.cache.SetTenants(next.tenants.list)
		}},
	{name: "priorities",
		apply: func(_ context.Context, s *service, next *settings) error {
			s.cache.SetPreferences(next.priorities.list)
			return nil
		}},
	{name: "eviction",
		apply: func(_ context.Context, s *service, next *settings) error {
			return s.cache.SetEviction(next.eviction.word)
		}},
	{name: "placement", apply: setPlacement},
	{name: "placement-threshold", apply: setPlacement},
	{name: "placement-penalty", apply: setPlacement},
	{name: "transfers",
		apply: func(_ context.Context, s *service, next *settings) error {
			return s.cache.SetTransfers(next.transfers.word)
		}},
	{name: "log-level",
		apply: func(_ context.Context, s *service, next *settings) error {
			return setLevel(&s.plan.level, next.logLevel.word)
		}},
}

// liveNames lists the names of live settings.
func liveNames() (names []string) {
	for _, l := range liveSettings {
		names = append(names, l.name)
	}
	return names
}

func setLevel(level *slog.LevelVar, word string) error {
	var l slog.Level
	if err := l.UnmarshalText([]byte(word)); err != nil {
		return err
	}
	level.Set(l)
	return nil
}

// setPlacement applies all three settings of placement.
func setPlacement(_ context.Context, s *service, next *settings) error {
	return s.cache.SetPlacement(next.placing())
}

func checkBudget(s *service, next *settings) error {
	bytes := int64(next.gpuMemory.size)
	switch {
	case len(s.cache.Devices()) == 0:
		return errors.New("the mount has no devices (--gpus none)")
	case bytes == 0 && s.plan.gpuMemory.size != 0:
		return errors.New("auto works only on a mount that was started with it; give a size such as 512M, 1.5G or 2GiB")
	case bytes == 0:
		return nil
	case bytes < emulated.Granularity:
		return fmt.Errorf("%s is too little: a device needs at least %dMiB", next.gpuMemory.String(),
			emulated.Granularity>>20)
	}
	return s.cache.CheckBudget(bytes)
}

// budgetNote gives the sizes of live budgets, and what is still used beyond a budget.
func budgetNote(s *service) string {
	var notes []string
	live := s.settingsNow().gpuMemory.size == 0
	for _, d := range s.cache.Status().Devices {
		if live && d.MemoryWhy != "" {
			notes = append(notes, fmt.Sprintf("gpu%d has %s: %s", d.Device, bytesText(d.MemoryBytes), d.MemoryWhy))
		}
		if d.UsedBytes > d.MemoryBytes {
			notes = append(notes, fmt.Sprintf("gpu%d still uses %s, until programs unmap it", d.Device,
				bytesText(d.UsedBytes)))
		}
	}
	return strings.Join(notes, "; ")
}

// liveState is the present settings of a mount.
type liveState struct {
	changing sync.Mutex // held while settings are changed
	mu       sync.Mutex
	now      settings // protected by mu
}

// settingState is a setting in the answer to `gaiafs set`.
type settingState struct {
	Name  string `json:"name"`
	Value string `json:"value"`
	// Before is the previous value, if this call changed it.
	Before string `json:"before,omitempty"`
	Note   string `json:"note,omitempty"`
}

// settingStates is the whole answer. docs/status.md documents it.
type settingStates struct {
	Settings []settingState `json:"settings"`
}

// errnoError is an error for a client: an errno to act on, and a sentence.
type errnoError struct {
	syscall.Errno
	text string
}

func (e *errnoError) Error() string { return e.text }
func (e *errnoError) Unwrap() error { return e.Errno }

func invalid(format string, args ...any) error {
	return &errnoError{syscall.EINVAL, fmt.Sprintf(format, args...)}
}

// serveSet changes settings: all of them, or none if one is refused by its check.
func (s *service) serveSet(ctx context.Context, r control.SetRequest) ([]byte, error) {
	s.live.changing.Lock()
	defer s.live.changing.Unlock()
	before := s.settingsNow()
	next := before
	flags := next.flags()
	chosen, texts, err := chooseSettings(flags, r.Settings)
	if err != nil {
		return nil, err
	}
	for _, l := range chosen {
		if l.check != nil {
			if err := l.check(s, &next); err != nil {
				return nil, settingError(l.name, err)
			}
		}
	}
	for _, l := range chosen {
		if err := l.apply(ctx, s, &next); err != nil {
			return nil, settingError(l.name, err)
		}
		s.log.Info("a setting was changed", "setting", l.name, "value", flags.Lookup(l.name).Value.String())
		s.live.mu.Lock()
		_ = setFlag(s.live.now.flags(), l.name, texts[l.name]) // next accepted it
		s.live.mu.Unlock()
	}
	return json.Marshal(s.settingStates(&before))
}

// chooseSettings sets flags from texts of the form NAME=VALUE. It returns the settings to apply and their values.
func chooseSettings(flags *pflag.FlagSet, texts []string) (chosen []liveSetting, values map[string]string, err error) {
	values = make(map[string]string)
	for _, text := range texts {
		name, value, ok := strings.Cut(text, "=")
		if !ok {
			return nil, nil, invalid("%q is not NAME=VALUE", text)
		}
		i := slices.IndexFunc(liveSettings, func(l liveSetting) bool { return l.name == name })
		switch {
		case i < 0 && flags.Lookup(name) != nil:
			return nil, nil, invalid("%s is fixed when the mount is made; these can be changed: %s", name,
				strings.Join(liveNames(), ", "))
		case i < 0:
			return nil, nil, invalid("there is no setting %q; these can be changed: %s", name,
				strings.Join(liveNames(), ", "))
		case slices.Contains(slices.Collect(maps.Keys(values)), name):
			return nil, nil, invalid("%s is given twice", name)
		}
		if err := setFlag(flags, name, value); err != nil {
			return nil, nil, invalid("%s: %v", name, cause(err))
		}
		chosen, values[name] = append(chosen, liveSettings[i]), value
	}
	return chosen, values, nil
}

// setFlag sets a flag to a client's value. It opens no file.
func setFlag(flags *pflag.FlagSet, name, value string) error {
	if f, ok := flags.Lookup(name).Value.(fileSetting); ok {
		return f.take(value)
	}
	return flags.Set(name, value)
}

// settingError adds the setting's name to an error. An error without an errno gets EINVAL.
func settingError(name string, err error) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		errno = syscall.EINVAL
	}
	return &errnoError{errno, fmt.Sprintf("%s: %v", name, err)}
}

// settingsNow returns a copy of the present settings.
func (s *service) settingsNow() settings {
	s.live.mu.Lock()
	defer s.live.mu.Unlock()
	return s.live.now
}

// settingStates describes the live settings. before is their previous state, or nil.
func (s *service) settingStates(before *settings) settingStates {
	now := s.settingsNow()
	flags := now.flags()
	all := settingStates{}
	for _, l := range liveSettings {
		state := settingState{Name: l.name, Value: flags.Lookup(l.name).Value.String()}
		if before != nil {
			if was := before.flags().Lookup(l.name).Value.String(); was != state.Value {
				state.Before = was
			}
		}
		if l.note != nil {
			state.Note = l.note(s)
		}
		all.Settings = append(all.Settings, state)
	}
	return all
}

// describeSettings returns the values of the live settings, and the names of those that differ from the start of the
// mount.
func (s *service) describeSettings() (values map[string]string, changed []string) {
	now, mounted, values := s.settingsNow(), *s.plan.settings, make(map[string]string)
	flags, first := now.flags(), mounted.flags()
	for _, name := range liveNames() {
		values[name] = flags.Lookup(name).Value.String()
		if values[name] != first.Lookup(name).Value.String() {
			changed = append(changed, name)
		}
	}
	return values, changed
}
