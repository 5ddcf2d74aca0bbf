package fs

import (
	"bytes"
	"os"
)

// procStatus returns a value of a process or thread in /proc, by its name with the colon (proc_pid_status(5)). process
// is a number or "self". ok is false if the daemon does not see the process.
func procStatus(process, name string) (value string, ok bool) {
	status, err := os.ReadFile("/proc/" + process + "/status")
	if err != nil {
		return "", false
	}
	for line := range bytes.Lines(status) {
		if value, is := bytes.CutPrefix(line, []byte(name)); is {
			return string(bytes.TrimSpace(value)), true
		}
	}
	return "", false
}

// procStat returns what /proc says of a process or thread, from its state on (proc_pid_stat(5)). It returns nil if the
// daemon does not see it.
func procStat(process string) []byte {
	stat, err := os.ReadFile("/proc/" + process + "/stat")
	if err != nil {
		return nil
	}
	// The name, in brackets, may contain any characters.
	_, rest, _ := bytes.Cut(stat[bytes.LastIndexByte(stat, ')')+1:], []byte(" "))
	return rest
}
