package demo

import (
	"cmp"
	"fmt"
	"io"
	"text/tabwriter"
)

// ReportVersion is the version of the Report's JSON form. It grows when a field is removed or changes its meaning.
const ReportVersion = 1

// Report is the result of a run. Pages are 4 KiB. docs/demo.md documents its JSON form.
type Report struct {
	Version  int             `json:"version"`
	Pictures []PictureReport `json:"pictures"`
	// Width and Height are those of the stitched picture, in pixels.
	Width       int   `json:"width"`
	Height      int   `json:"height"`
	Tiles       int   `json:"tiles"`
	OutputBytes int64 `json:"output_bytes"`

	// CPU describes the program of the left half: a CPU program, or that of the first device if there are two.
	CPU    ProgramReport `json:"cpu"`
	Device ProgramReport `json:"device"`
	// SharedPages is how many pages both programs wrote.
	SharedPages      int64 `json:"shared_pages"`
	MergedPages      int64 `json:"merged_pages"`
	OverlappingBytes int64 `json:"overlapping_bytes"`
	// StitchSeconds is the time of both programs at once, Seconds that of the whole run.
	StitchSeconds float64 `json:"stitch_seconds"`
	Seconds       float64 `json:"seconds"`

	// The Differences count bytes that differ from a single-process run.
	MountDifferences   int64 `json:"mount_differences"`
	BackingDifferences int64 `json:"backing_differences"`
	// Picture is the path of the PNG.
	Picture string `json:"picture"`
}

// PictureReport describes a picture that was used.
type PictureReport struct {
	Name   string `json:"name"`
	Width  int    `json:"width"`
	Height int    `json:"height"`
}

// ProgramReport describes one of the two programs.
type ProgramReport struct {
	work
	// Program says where it ran: "CPU program", "gpu1 program".
	Program string `json:"program"`
	// ExpectedPages is how many pages its half of the rows touches.
	ExpectedPages int64 `json:"expected_pages"`
	// Kind and Name describe the device. They are empty for the CPU.
	Kind string `json:"kind,omitempty"`
	Name string `json:"name,omitempty"`
}

// Print writes the report as a table.
func (r *Report) Print(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "\t%s\t%s\tboth\t\n", r.CPU.Program, r.Device.Program)
	fmt.Fprintf(t, "memory\t%s\t%s\t\t\n", cmp.Or(r.CPU.Kind, "mmap"), r.Device.Kind)
	fmt.Fprintf(t, "pages written\t%d\t%d\t%d\t\n", r.CPU.Pages, r.Device.Pages,
		r.CPU.Pages+r.Device.Pages-r.SharedPages)
	fmt.Fprintf(t, "pages shared\t\t\t%d\t\n", r.SharedPages)
	fmt.Fprintf(t, "pages merged\t\t\t%d\t\n", r.MergedPages)
	fmt.Fprintf(t, "overlapping bytes\t\t\t%d\t\n", r.OverlappingBytes)
	fmt.Fprintf(t, "seconds\t%.2f\t%.2f\t%.2f\t\n", r.CPU.Seconds, r.Device.Seconds, r.StitchSeconds)
	if err := t.Flush(); err != nil {
		return err
	}
	if r.MountDifferences+r.BackingDifferences == 0 {
		_, err := fmt.Fprintf(w, "\nAll %d bytes equal those of a single-process run, through the mount and in the backing file.\n"+
			"The stitched picture is %s (%d × %d pixels).\n", r.OutputBytes, r.Picture, r.Width, r.Height)
		return err
	}
	_, err := fmt.Fprintf(w, "\nOf %d bytes, %d read through the mount and %d in the backing file differ from a single-process run.\n"+
		"The picture with these differences: %s\n", r.OutputBytes, r.MountDifferences, r.BackingDifferences, r.Picture)
	return err
}
