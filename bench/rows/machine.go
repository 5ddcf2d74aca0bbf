package rows

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"
)

// Machine describes the machine of a run.
type Machine struct {
	Kernel  string  `json:"kernel"`
	CPU     string  `json:"cpu"`
	Cores   int     `json:"cores"`
	Memory  int64   `json:"memory_bytes"`
	Backing string  `json:"backing"`
	Go      string  `json:"go"`
	Load    float64 `json:"load_at_start"` // runnable processes, averaged over a minute
	Command string  `json:"command"`
	// Devices describes the GPUs, if the rows use any.
	Devices []string `json:"devices,omitempty"`
}

// Describe describes the machine. dir is on the backing filesystem.
func Describe(dir, command string) Machine {
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), Command: command, CPU: cpuName(), Backing: "unknown"}
	if kind, options := Filesystem(dir); kind != "" {
		m.Backing = fmt.Sprintf("%s (%s)", kind, options)
	}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m.Kernel = unix.ByteSliceToString(u.Sysname[:]) + " " + unix.ByteSliceToString(u.Release[:])
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		m.Memory = int64(si.Totalram) * int64(si.Unit)
		m.Load = float64(si.Loads[0]) / 65536
	}
	return m
}

func cpuName() string {
	f, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if name, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// Filesystem returns the kind and the mount options of a file's filesystem, or "" if they cannot be found out.
func Filesystem(path string) (kind, options string) {
	var st unix.Stat_t
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil || unix.Stat(path, &st) != nil {
		return "", ""
	}
	defer f.Close()
	device := fmt.Sprintf("%d:%d", unix.Major(st.Dev), unix.Minor(st.Dev))
	for lines := bufio.NewScanner(f); lines.Scan(); {
		left, right, _ := strings.Cut(lines.Text(), " - ")
		a, b := strings.Fields(left), strings.Fields(right)
		if len(a) > 5 && len(b) > 1 && a[2] == device {
			return b[0], a[5]
		}
	}
	return "", ""
}

func (m *Machine) markdown() string {
	text := fmt.Sprintf("- %s, %s, %d cores, %.0f GiB of memory, backing filesystem %s, %s\n",
		m.Kernel, m.CPU, m.Cores, float64(m.Memory)/(1<<30), m.Backing, m.Go)
	for _, d := range m.Devices {
		text += "- " + d + "\n"
	}
	return text + fmt.Sprintf("- load at the start: %.2f\n- `%s`", m.Load, m.Command)
}

func (m *Machine) String() string {
	return fmt.Sprintf("%s, %s, %d cores, %.0f GiB, backing %s, %s, load %.2f",
		m.Kernel, m.CPU, m.Cores, float64(m.Memory)/(1<<30), m.Backing, m.Go, m.Load)
}
