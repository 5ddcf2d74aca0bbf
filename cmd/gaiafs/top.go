package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/spf13/cobra"
)

func newTop() *cobra.Command {
	var once bool
	every := span{Duration: time.Second, min: 100 * time.Millisecond}
	cmd := &cobra.Command{
		Use:   "top MOUNTPOINT",
		Short: "Watch devices, rates, files and clients of a mount",
		Long: `top shows what devices hold (clean, dirty and stale pages), how much of it is in pinned memory of the host, what
moves in and out, and where reads of CPU programs come from. Below are the busiest files, a map of the chosen file, and
the busiest programs. What views hold counts, too. In the map, a letter stands for a part of the file: c clean, d dirty,
s stale, a dot if absent.
Arrow keys choose the file; q quits. It needs a terminal of 80 columns and 24 lines; --once prints one frame anywhere.
It uses no colours.`,
		Example: `  gaiafs top /mnt/data
  gaiafs top --once /mnt/data`,
		Args: arguments("MOUNTPOINT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := shownBy(args[0])
			if err != nil {
				return statusError(args[0], err)
			}
			first := topSample{s, time.Now()}
			if once {
				_, err := io.WriteString(cmd.OutOrStdout(), topFrame(first, first, 0, leastWidth, leastHeight))
				return err
			}
			out, terminal := beneath(cmd.OutOrStdout()).(*os.File)
			in, _ := cmd.InOrStdin().(*os.File)
			if !terminal || in == nil || !isTerminal(out) || !isTerminal(in) {
				return usagef("top needs a terminal: --once prints one frame without one")
			}
			if os.Getenv("TERM") == "dumb" {
				return usagef("top cannot update a terminal whose TERM is dumb: --once prints one frame")
			}
			m := topModel{mountpoint: args[0], every: every.Duration, before: first, now: first, width: leastWidth,
				height: leastHeight}
			last, err := tea.NewProgram(m, tea.WithInput(in), tea.WithOutput(out)).Run()
			if err != nil {
				return err
			}
			return last.(topModel).err
		},
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return mountpoints(), cobra.ShellCompDirectiveNoFileComp
		},
	}
	cmd.Flags().BoolVar(&once, "once", false, "print one frame and exit")
	cmd.Flags().Var(&every, "interval", "how often to update")
	return cmd
}

// The smallest terminal.
const leastWidth, leastHeight = 80, 24

// topSample is the status at one time.
type topSample struct {
	statusDocument
	at time.Time
}

// shownBy asks the daemon of a mountpoint for the status.
func shownBy(mountpoint string) (statusDocument, error) {
	return decode[statusDocument](askDaemon(mountpoint, patience))
}

// topModel is the state of the live view (tea.Model).
type topModel struct {
	mountpoint    string
	every         time.Duration
	before, now   topSample
	chosen        uint64 // inode number of the chosen file; 0 until a key chooses one, which stands for the first row
	width, height int
	err           error
}

// sampled is a message with a new status, or the reason why there is none.
type sampled struct {
	topSample
	err error
}

// Init implements tea.Model.
func (m topModel) Init() tea.Cmd { return m.sample() }

// sample asks for the status after m.every. If the daemon does not answer within patience, the view ends.
func (m topModel) sample() tea.Cmd {
	return tea.Tick(m.every, func(time.Time) tea.Msg {
		s, err := shownBy(m.mountpoint)
		return sampled{topSample{s, time.Now()}, err}
	})
}

// Update implements tea.Model.
func (m topModel) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case tea.KeyPressMsg:
		switch msg.String() {
		case "q", "ctrl+c", "esc":
			return m, tea.Quit
		case "down", "j":
			m.choose(+1)
		case "up", "k":
			m.choose(-1)
		}
	case sampled:
		if msg.err != nil {
			m.err = statusError(m.mountpoint, msg.err)
			return m, tea.Quit
		}
		m.before, m.now = m.now, msg.topSample
		return m, m.sample()
	}
	return m, nil
}

// choose chooses the file that is by rows below the chosen one on the screen.
func (m *topModel) choose(by int) {
	files := topFiles(m.before, m.now)
	if row := fileRow(files, m.chosen) + by; row >= 0 && row < len(files) {
		m.chosen = files[row].Inode
	}
}

// View implements tea.Model.
func (m topModel) View() tea.View {
	v := tea.NewView(m.screen())
	v.AltScreen = true
	return v
}

// screen returns the text of the view.
func (m topModel) screen() string {
	if m.width < leastWidth || m.height < leastHeight {
		return fmt.Sprintf("top needs %d columns and %d lines.\nThis terminal has %d and %d.\n", leastWidth, leastHeight,
			m.width, m.height)
	}
	frame := topFrame(m.before, m.now, m.chosen, m.width, m.height-1)
	return frame + strings.Repeat("\n", max(m.height-1-strings.Count(frame, "\n"), 0)) + topKeys
}

// topKeys is the last line of the screen.
const topKeys = "up, down: choose a file   q: quit   map: c clean, d dirty, s stale, . absent"
