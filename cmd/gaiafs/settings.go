package main

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/pagecache"
)

// settings are the options of a mount. docs/configuration.md describes them.
type settings struct {
	gpus              gpuChoice
	gpuMemory         budget
	hostMemory        size
	pinnedMemory      size
	socket            string
	allowOther        bool
	userShare         percentage
	trustUsers        bool
	tenants           listFile[pagecache.Tenant]
	priorities        listFile[pagecache.Preference]
	eviction          choice
	placement         choice
	placeThreshold    factor
	placePenalty      factor
	transfers         choice
	readOnly          bool
	restrict          restriction
	kernelOpens       bool
	passthrough       choice
	writeBack         bool
	deviceReads       choice
	writeBackInterval span
	directReads       choice
	neighbourLinks    choice
	sourceEvents      choice
	attrTimeout       span
	entryTimeout      span
	metrics           string
	metricsToken      string
	logLevel          choice
	logFormat         choice
	logFile           string
	debugFuse         bool
}

func newSettings() *settings {
	return &settings{
		gpus:              gpuChoice{"auto"},
		hostMemory:        defaultHostMemory(cgroupLimit),
		pinnedMemory:      pinnedShare * defaultHostMemory(cgroupLimit),
		userShare:         75,
		tenants:           listFile[pagecache.Tenant]{what: "tenants", parse: parseTenants},
		priorities:        listFile[pagecache.Preference]{what: "priorities", parse: parsePriorities},
		eviction:          choice{pagecache.DefaultEviction, pagecache.EvictionNames()},
		placement:         choice{pagecache.PlaceEagerly, pagecache.PlacementNames()},
		placeThreshold:    pagecache.DefaultPlacementThreshold,
		placePenalty:      pagecache.DefaultPlacementPenalty,
		transfers:         choice{pagecache.DefaultTransfers, pagecache.TransferNames()},
		passthrough:       choice{"auto", []string{"auto", "off"}},
		writeBackInterval: span{pagecache.DefaultWriteBackInterval, 10 * time.Millisecond},
		directReads:       choice{"auto", []string{"auto", "off"}},
		neighbourLinks:    choice{"auto", []string{"auto", "off"}},
		sourceEvents: choice{fs.EventsAuto, []string{fs.EventsAuto, fs.EventsAll, fs.EventsFanotify,
			fs.EventsInotify, fs.EventsOff}},
		deviceReads:  choice{"auto", pagecache.DeviceReadsWords()},
		attrTimeout:  span{Duration: time.Second},
		entryTimeout: span{Duration: time.Second},
		logLevel:     choice{"info", []string{"debug", "info", "warn", "error"}},
		logFormat:    choice{"text", []string{"text", "json"}},
	}
}

// placing returns the settings of placement.
func (s *settings) placing() pagecache.PlacementPolicy {
	return pagecache.PlacementPolicy{
		Name: s.placement.word, Threshold: uint64(s.placeThreshold), Penalty: uint64(s.placePenalty),
	}
}

// flags returns flags that set s. Their defaults are the present values of s. Their names are also the keys of a
// configuration file.
func (s *settings) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("settings", pflag.ContinueOnError)
	f.Var(&s.gpus, "gpus", "devices: auto, none, or several of cuda[:0,1] and emulated[:N], as in cuda:0,emulated:1; cuda:-1 is all GPUs but 1")
	f.Var(&s.gpuMemory, "gpu-memory", "memory of each device that the cache may use")
	f.Var(&s.hostMemory, "host-memory",
		"host memory for what grows with the work of programs: base copies, page states, pages read ahead "+
			"(default: a sixteenth of the machine's)")
	f.Lookup("host-memory").DefValue = "" // so that the help text is the same on every machine
	f.Var(&s.pinnedMemory, "pinned-memory",
		"host memory that may be pinned, for files ('gaiafs pin --device host') and for what does not fit on devices; 0 is none "+
			"(default: a quarter of the machine's)")
	f.Lookup("pinned-memory").DefValue = ""
	f.StringVar(&s.socket, "socket", s.socket,
		"absolute `PATH` of the control socket (default: one for the mountpoint in the runtime directory)")
	f.BoolVar(&s.allowOther, "allow-other", s.allowOther,
		"let other users use the mount, within the files' permissions")
	f.Var(&s.userShare, "user-share",
		"with --allow-other, the part of each device's memory that the programs of one user may map")
	f.BoolVar(&s.trustUsers, "trust-users", s.trustUsers,
		"let all users of the mount share device memory; docs/security.md says what that means")
	f.Var(&s.priorities, "priorities", "TOML file that says which files' memory goes first; docs/eviction.md describes it")
	f.Var(&s.tenants, "tenants", "TOML file with shares of device memory by user, cgroup, name and directory; docs/tenants.md describes it")
	f.Var(&s.eviction, "eviction", "which extent goes first when a device is full; docs/eviction.md describes the rules")
	f.Var(&s.placement, "placement",
		"when memory that brackets use moves to the device: with the first one, or after enough accesses")
	f.Var(&s.placeThreshold, "placement-threshold", "with --placement threshold, accesses that are enough when the device is nearly full")
	f.Var(&s.placePenalty, "placement-penalty", "with --placement threshold, factor on these if other memory has to leave")
	f.Var(&s.transfers, "transfers",
		"which transfer of a device begins next; docs/transfers.md describes the disciplines")
	f.BoolVar(&s.readOnly, "read-only", s.readOnly, "refuse all changes")
	f.BoolVar(&s.kernelOpens, "kernel-opens", s.kernelOpens,
		"let the kernel open files and directories itself, which is faster for many small files; docs/kernel-opens.md has the rules")
	f.Var(&s.restrict, "restrict", "restrictions in addition to those of SOURCE's filesystem: nosuid, nodev, noexec")
	f.Var(&s.passthrough, "passthrough",
		"auto: without devices, or read-only, let the kernel read and write the files of SOURCE itself")
	f.BoolVar(&s.writeBack, "write-back", s.writeBack,
		"let the kernel keep writes and send them later; docs/write-back.md describes the cost")
	f.Var(&s.writeBackInterval, "write-back-interval",
		"longest time until released bytes are in the backing file")
	f.Var(&s.directReads, "direct-reads",
		"how devices are filled from the disk: auto bypasses the host's page cache if that is possible")
	f.Var(&s.neighbourLinks, "neighbour-links",
		"auto: also fill large views over the links of idle devices if that is faster")
	f.Var(&s.sourceEvents, "source-events",
		"which kernel events report changes made directly in SOURCE; with all, the kernel keeps names and attributes for a minute")
	f.Var(&s.deviceReads, "device-reads", "when CPU reads of bytes that the disk has are served by a device")
	f.Var(&s.attrTimeout, "attr-timeout", "how long the kernel may keep attributes without asking; 0 is not at all")
	f.Var(&s.entryTimeout, "entry-timeout", "how long the kernel may keep names without asking; 0 is not at all")
	f.StringVar(&s.metrics, "metrics", s.metrics,
		"serve metrics and a live page at `ADDRESS`, as 127.0.0.1:9400; beyond this machine only with a token")
	f.StringVar(&s.metricsToken, "metrics-token-file", s.metricsToken,
		"require the token in the file `PATH` from readers of metrics")
	f.Var(&s.logLevel, "log-level", "lowest severity that is logged")
	f.Var(&s.logFormat, "log-format", "format of the log")
	f.StringVar(&s.logFile, "log-file", s.logFile,
		"append the log to `PATH` (default: standard error; with --daemon a file named after the mountpoint)")
	f.BoolVar(&s.debugFuse, "debug-fuse", s.debugFuse, "log every request of the kernel")
	return f
}

// variable returns the name of a setting's environment variable.
func variable(setting string) string {
	return "GAIAFS_" + strings.ToUpper(strings.ReplaceAll(setting, "-", "_"))
}

// complete fills in settings that the command line does not give: first from the environment, then from the
// configuration files. f has the settings' flags, parsed.
func complete(f *pflag.FlagSet, config string, environment func(string) (string, bool)) error {
	given := make(map[string]bool)
	f.Visit(func(fl *pflag.Flag) { given[fl.Name] = true })
	own := newSettings().flags() // f may also have flags that are no settings
	var failed error
	own.VisitAll(func(fl *pflag.Flag) {
		text, ok := environment(variable(fl.Name))
		if !ok || given[fl.Name] || failed != nil {
			return
		}
		given[fl.Name] = true
		if err := f.Set(fl.Name, text); err != nil {
			failed = usagef("%s: %w", variable(fl.Name), cause(err))
		}
	})
	if failed != nil {
		return failed
	}
	files, err := configFiles(config, environment)
	if err != nil {
		return err
	}
	for _, c := range files {
		values, err := c.read(own)
		if err != nil {
			return err
		}
		for name, text := range values {
			if given[name] {
				continue
			}
			given[name] = true
			if err := f.Set(name, text); err != nil {
				return c.fault(name, cause(err))
			}
		}
	}
	return nil
}

// cause unwraps pflag's error about a Value, whose text speaks of flags.
func cause(err error) error {
	var invalid *pflag.InvalidValueError
	if !errors.As(err, &invalid) {
		return err
	}
	if invalid.GetFlag().Value.Type() == "bool" {
		return fmt.Errorf("%q is neither true nor false", invalid.GetValue())
	}
	return invalid.Unwrap()
}

// osEnvironment looks up a variable of the process. An empty variable counts as unset.
func osEnvironment(name string) (string, bool) {
	v := os.Getenv(name)
	return v, v != ""
}

// settingNames lists the names of the settings.
func settingNames() []string {
	var names []string
	newSettings().flags().VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return names
}
