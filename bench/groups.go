package bench

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/gaiafs/gaiafs/bench/rows"
)

// group is a set of rows that share what they run on.
type group struct {
	name string
	// about is the group in a line.
	about string
	// rows makes the rows when the group's turn comes; rows.Impossible leaves the group out, with the reason in the
	// table.
	rows func(ctx context.Context, s *session) ([]rows.Row, error)
	// reads says that the rows, or some of them, can read a file of the user's.
	reads bool
	// share is the part of the time that the group gets with Quick, in seconds where all groups run.
	share int
	// room and quickRoom are the bytes that the files take, in MiB.
	room, quickRoom int64
}

// groups are all there are, in the order in which they run.
var groups = []group{
	{
		name: "merge", about: "merging a page that several wrote",
		rows: mergeRows, share: 1,
	},
	{
		name: "modified", about: "finding the modified pages on a device",
		rows: modifiedRows, share: 3,
	},
	{
		name: "state", about: "host memory that versions and page states take",
		rows: stateRows, share: 2,
	},
	{
		name: "device", about: "mapping, acquire and release",
		rows: deviceRows, share: 9, room: 2100, quickRoom: 520,
	},
	{
		name: "evict", about: "memory of one device while another one evicts to a slow disk",
		rows: evictRows, share: 2, room: 100, quickRoom: 100,
	},
	{
		name: "sharing", about: "a CPU and a device program that write the same pages",
		rows: sharingRows, share: 5, room: 600, quickRoom: 70,
	},
	{
		name: "fio", about: "fio through each mount and without one",
		rows: fioRows, share: 50, reads: true, room: 1700, quickRoom: 900,
	},
	{
		name: "cached", about: "CPU reads of a file of which a part is on a device (thesis, figure 6.1)",
		rows: cachedRows, share: 15, reads: true, room: 1100, quickRoom: 160,
	},
	{
		name: "versions", about: "what many devices cost programs on the CPU",
		rows: versionRows, share: 7, room: 60, quickRoom: 20,
	},
	{
		name: "metadata", about: "names and attributes",
		rows: metadataRows, share: 5, room: 50, quickRoom: 20,
	},
	{
		name: "tree", about: "trees of small files, git, a Go build",
		rows: treeRows, share: 9, room: 2500, quickRoom: 400,
	},
	{
		name: "small", about: "a data set of small files, on read-only mounts",
		rows: smallRows, share: 3, room: 700, quickRoom: 100,
	},
	{
		name: modelGroup, about: "loading a model, and computing with it, against safetensors",
		rows: modelRows, share: 90, reads: true,
	},
}

// List writes the names of the groups, and what they are about.
func List(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, g := range groups {
		note := ""
		switch {
		case g.name == modelGroup:
			note = " (with --model only)"
		case g.reads:
			note = " (can read --file)"
		}
		fmt.Fprintf(w, "%s\t%s%s\n", g.name, g.about, note)
	}
	return w.Flush()
}
