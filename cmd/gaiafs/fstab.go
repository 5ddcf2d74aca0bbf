package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// mount(8) and umount(8) call this program by these names for the type fuse.gaiafs.
const (
	mountHelper   = "mount.fuse.gaiafs"
	unmountHelper = "umount.fuse.gaiafs"
)

// Exit codes of mount(8) and umount(8).
const (
	mountUsage   = 1
	mountFailure = 32
)

// asHelper converts a command line of mount(8), SOURCE MOUNTPOINT [-sfnrvw] [-t TYPE] [-o OPTIONS], into one of gaiafs.
// done says that there is nothing to do.
func asHelper(args []string) (command []string, done bool, err error) {
	var flags, options []string
	sloppy, fake := false, false
	places, err := eachOption(args, "to", func(option byte, value string) error {
		switch option {
		case 'n', 'v': // -n: no /etc/mtab; -v: verbose
		case 's':
			sloppy = true
		case 'f':
			fake = true
		case 'r':
			options = append(options, "ro")
		case 'w':
			options = append(options, "rw")
		case 'o':
			options = append(options, splitOptions(value)...)
		case 't':
			if value != "fuse.gaiafs" && value != "gaiafs" {
				return usagef("type %s is not a type of gaiafs", value)
			}
		default:
			return usagef("-%c is not known", option)
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	if len(places) != 2 {
		return nil, false, usagef("SOURCE and MOUNTPOINT are needed; %s given", were(len(places)))
	}
	restrict := []string{}
	for _, o := range options {
		name, value, valued := strings.Cut(o, "=")
		switch {
		case o == "ro":
			flags = append(flags, "--read-only=true")
		case o == "rw":
			flags = append(flags, "--read-only=false")
		case o == "nosuid" || o == "nodev" || o == "noexec":
			restrict = append(restrict, o)
		case forOthers(name):
		default:
			flag, err := settingFlag(name, value, valued)
			if err != nil && !sloppy {
				return nil, false, err
			}
			if err == nil {
				flags = append(flags, flag)
			}
		}
	}
	if len(restrict) > 0 {
		flags = append(flags, "--restrict="+strings.Join(restrict, ","))
	}
	command = append(append([]string{"mount", "--daemon"}, flags...), "--", places[0], places[1])
	return command, fake, nil
}

// asUnmountHelper converts a command line of umount(8), MOUNTPOINT [-flnrv] [-N NAMESPACE] [-t TYPE], into one of
// gaiafs. If lazy is set, detach the mount of command's last argument instead.
func asUnmountHelper(args []string) (command []string, lazy bool, err error) {
	command = []string{"umount"}
	places, err := eachOption(args, "Nt", func(option byte, _ string) error {
		switch option {
		case 'n', 'v', 'r': // -n: no /etc/mtab; -v: verbose; -r: remount read-only if busy, which gaiafs cannot do
		case 'N', 't': // umount(8) has already entered the namespace
		case 'f':
			command = append(command, "--force")
		case 'l':
			lazy = true
		default:
			return usagef("-%c is not known", option)
		}
		return nil
	})
	if err != nil {
		return nil, false, err
	}
	if len(places) != 1 {
		return nil, false, usagef("MOUNTPOINT is needed; %s given", were(len(places)))
	}
	return append(command, "--", places[0]), lazy, nil
}

// eachOption calls take for each option of a helper's command line. The options in valued have a value: the rest of
// their argument, or the next argument. It returns the arguments that are not options.
func eachOption(args []string, valued string, take func(option byte, value string) error) (rest []string, err error) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if len(arg) < 2 || arg[0] != '-' {
			rest = append(rest, arg)
			continue
		}
		if strings.HasPrefix(arg, "--") {
			return nil, usagef("%s is not known", arg)
		}
		for at := 1; at < len(arg); at++ {
			option, value := arg[at], ""
			if strings.IndexByte(valued, option) >= 0 {
				if value, at = arg[at+1:], len(arg); value == "" {
					if i++; i == len(args) {
						return nil, usagef("-%c needs an argument", option)
					}
					value = args[i]
				}
			}
			if err := take(option, value); err != nil {
				return nil, err
			}
		}
	}
	return rest, nil
}

// splitOptions splits options at commas outside double quotes, and removes the quotes.
func splitOptions(text string) (options []string) {
	var b strings.Builder
	quoted := false
	end := func() {
		if b.Len() > 0 {
			options = append(options, b.String())
		}
		b.Reset()
	}
	for _, r := range text {
		switch {
		case r == '"':
			quoted = !quoted
		case r == ',' && !quoted:
			end()
		default:
			b.WriteRune(r)
		}
	}
	end()
	return options
}

// forOthers reports whether an option is meant for mount(8), systemd or the reader, or asks for what gaiafs does
// anyway.
func forOthers(name string) bool {
	switch name {
	case "defaults", "auto", "noauto", "nofail", "_netdev", "user", "nouser", "users", "owner", "group", "comment",
		"suid", "dev", "exec", "async", "nomand", "default_permissions",
		// The filesystem of SOURCE maintains access times.
		"atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "nostrictatime", "nolazytime", "loud",
		"silent":
		return true
	}
	return strings.HasPrefix(name, "x-") || strings.HasPrefix(name, "X-")
}

// settingFlag returns the flag for an option named like a setting, with - or _ between words.
func settingFlag(name, value string, valued bool) (string, error) {
	known := newSettings().flags().Lookup(strings.ReplaceAll(name, "_", "-"))
	switch {
	case name == "config" && valued:
		return "--config=" + value, nil
	case name == "remount":
		return "", usagef("gaiafs cannot remount: unmount it, and mount it again")
	case known == nil:
		return "", usagef("there is no option %q; 'gaiafs mount --help' lists the settings, which are the options, with _ or -",
			name)
	case !valued && known.Value.Type() != "bool":
		return "", usagef("option %q needs a value, for example %s=%s", name, name, known.Value.Type())
	case !valued:
		value = "true"
	}
	return "--" + known.Name + "=" + value, nil
}

// isHelper and isUnmountHelper report whether the caller is mount(8) or umount(8).
func isHelper(program string) bool        { return filepath.Base(program) == mountHelper }
func isUnmountHelper(program string) bool { return filepath.Base(program) == unmountHelper }

// helperCode converts an exit code of gaiafs into one of mount(8).
func helperCode(code int) int {
	switch code {
	case exitOK:
		return 0
	case exitUsage:
		return mountUsage
	}
	return mountFailure
}

// asksHelp reports whether a helper's command line asks what the helper is.
func asksHelp(args []string) bool {
	return len(args) == 2 && (args[1] == "-h" || args[1] == "--help")
}

// runHelper runs a command line of mount(8). It stores the command line of gaiafs in args, from which the daemon is
// started.
func runHelper(args *[]string, run func([]string) int, tell func(string)) int {
	if asksHelp(*args) {
		tell(`mount(8) calls mount.fuse.gaiafs for the type fuse.gaiafs:

  mount -t fuse.gaiafs SOURCE MOUNTPOINT -o OPTIONS

The options are the settings that 'gaiafs mount --help' and mount.fuse.gaiafs(8) list.`)
		return 0
	}
	command, done, err := asHelper((*args)[1:])
	if err != nil {
		tell(fmt.Sprintf("%s: %s", mountHelper, err))
		return mountUsage
	}
	if done {
		return 0
	}
	*args = append([]string{"gaiafs"}, command...)
	code := run(command)
	if code == exitOK {
		register(command[len(command)-2], command[len(command)-1])
	}
	return helperCode(code)
}

// register makes umount(8) look for this type's helper when root unmounts. Otherwise umount(8) sees a filesystem of
// type fuse and removes it without a helper. It writes a note in /run/mount/utab, which belongs to root. For other
// users, umount(8) asks the kernel for the type.
func register(source, mountpoint string) {
	const helper = "/sbin/" + unmountHelper
	if _, err := os.Stat(helper); err != nil || os.Geteuid() != 0 {
		return
	}
	// Without the note, umount(8) works as for any filesystem. The path is absolute because mount(8) calls its helper
	// without a PATH.
	_ = exec.Command("/bin/mount", "--internal-only", "--fake", "--types", "fuse.gaiafs", "--options",
		"uhelper=fuse.gaiafs", source,
		mountpoint).Run()
}

// runUnmountHelper runs a command line of umount(8).
func runUnmountHelper(args []string, run func([]string) int, tell func(string)) int {
	if asksHelp(args) {
		tell(`umount(8) calls umount.fuse.gaiafs for the type fuse.gaiafs: umount MOUNTPOINT

umount.fuse.gaiafs(8) says more, and so does 'gaiafs umount --help'.`)
		return 0
	}
	command, lazy, err := asUnmountHelper(args[1:])
	if err != nil {
		tell(fmt.Sprintf("%s: %s", unmountHelper, err))
		return mountUsage
	}
	if lazy {
		if err := detach(command[len(command)-1]); err != nil {
			tell(fmt.Sprintf("%s: %s cannot be detached: %s", unmountHelper, command[len(command)-1], err))
			return mountFailure
		}
		return 0
	}
	return helperCode(run(command))
}
