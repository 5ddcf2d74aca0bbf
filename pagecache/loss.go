package pagecache

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/internal/page"
)

// maxLossRuns is the most runs of pages that a Loss lists.
const maxLossRuns = 256

// Loss describes data that was lost with a device: pages of a file that programs had released and that were not home
// yet.
type Loss struct {
	Device int    `json:"device"`
	ID     FileID `json:"-"`
	// File is the file's path below the mountpoint when it was last mapped.
	File  string `json:"file"`
	Pages int64  `json:"pages"`
	// Runs lists the pages as [first, end), ascending: the first maxLossRuns runs.
	Runs [][2]page.Index `json:"runs"`
}

func newLoss(device int, file string, runs []page.Range) *Loss {
	l := &Loss{Device: device, File: file}
	for i, rg := range runs {
		l.Pages += rg.Len()
		if i < maxLossRuns {
			l.Runs = append(l.Runs, [2]page.Index{rg.Start, rg.End})
		}
	}
	return l
}

// Where names the first few runs for a message.
func (l *Loss) Where() string {
	const most = 8
	var named []string
	left := l.Pages
	for i, r := range l.Runs {
		rg := page.Range{Start: r[0], End: r[1]}
		if i == most {
			break
		}
		named = append(named, rg.String())
		left -= rg.Len()
	}
	text := strings.Join(named, " ")
	if left > 0 {
		text += fmt.Sprintf(" and %d more", left)
	}
	return text
}

func (l *Loss) String() string {
	return fmt.Sprintf("released bytes of %s were lost with device %d: pages %s, %d in all", Printable(l.File),
		l.Device, l.Where(),
		l.Pages)
}

// gone returns the error for clients if the device is lost, else nil.
func (d *device) gone() error {
	if !d.lost.Load() {
		return nil
	}
	return &failure{syscall.ENODEV, fmt.Sprintf("device %d is lost, and with it all bytes that were not in the backing files; "+
		"'gaiafs status' lists the released pages among them; mount again to use the device", d.info.Ordinal),
		gpubackend.ErrDeviceLost}
}

// fault converts an error of the device or of home into the one for the client.
func (d *device) fault(err error) error {
	if gone := d.gone(); gone != nil {
		return gone
	}
	if errors.Is(err, gpubackend.ErrNoMemory) {
		text := fmt.Sprintf("device %d has no memory left for a copy; other programs use it (%v)", d.info.Ordinal, err)
		return &failure{syscall.ENOMEM, text, err}
	}
	return err
}

// lose reports whether err, from a call of the device, says that the device is lost. If so, all Files let go of it. The
// caller may hold one File.mu.
func (c *Cache) lose(d *device, err error) bool {
	if !errors.Is(err, gpubackend.ErrDeviceLost) {
		return false
	}
	if d.lost.CompareAndSwap(false, true) {
		c.log.Error("device lost; the mount goes on without it", "device", d.info.Ordinal, "error", err)
		select {
		case c.lost <- struct{}{}:
		default:
		}
	}
	return true
}

// letGoOfLost queues work that makes every File let go of the lost devices.
func (c *Cache) letGoOfLost() {
	for _, f := range c.snapshotFiles() {
		c.lanes.do(f, choreLetGo, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.unlockHomeLocked() // it may have been locked by the device
			for _, d := range c.devices {
				if d.lost.Load() {
					f.letGoLocked(d)
				}
			}
			f.dropIdleLocked()
		})
	}
}

// lostLocked is lose for callers that hold mu. If the device is lost, the File has let go of it on return.
func (f *File) lostLocked(d *device, err error) bool {
	if !f.c.lose(d, err) {
		return false
	}
	f.letGoLocked(d)
	return true
}

// letGoLocked drops what a lost device held of the file. Released pages that only the device had are named in the log,
// in the status, by the next Sync and by Close.
func (f *File) letGoLocked(d *device) {
	for h := range f.holdersLocked() {
		if h.dev == d && !h.empty() {
			h.letGoOfLocked()
		}
	}
	for _, v := range f.views.snapshot() {
		if v.dev == d {
			v.letGo()
		}
	}
}

func (h *holding) letGoOfLocked() {
	f := h.f
	d := h.dev
	runs := pendingOf(&f.lrc, page.Range{End: f.lrc.End()}, h.owner)
	for _, rg := range runs {
		f.views.spoil(rg) // the views may have them
	}
	// Nobody misses the bytes of an unlinked file.
	if len(runs) > 0 && !f.orphan {
		l := newLoss(d.info.Ordinal, f.Name(), runs)
		l.ID = f.id
		f.c.log.Error("released bytes were lost with the device", "device", l.Device, "file", l.File, "pages", l.Pages,
			"where", l.Where())
		f.count(func(c *Counters) { c.LostPages.Add(l.Pages) })
		f.unreported = append(f.unreported, l)
		f.c.mu.Lock()
		f.c.losses = append(f.c.losses, l)
		f.c.mu.Unlock()
	}
	writers := 0
	for m := range f.mappings {
		if m.h == h && m.writable {
			writers++
		}
	}
	if writers > 0 {
		f.c.log.Warn("stores since the last release were lost with the device", "device", d.info.Ordinal,
			"file", f.Name(),
			"mappings", writers)
	}
	// Clients may still map the extents. Memory and descriptors go once those mappings have ended.
	for _, x := range h.sorted() {
		f.loseExtentLocked(x)
	}
	if !f.waitsLocked() {
		f.nothingWaitsLocked()
	}
}

// reportLosses returns an error that names what was lost of the file since the last call, or nil.
func (f *File) reportLosses() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.unreported) == 0 {
		return nil
	}
	var texts []string
	for _, l := range f.unreported {
		texts = append(texts, l.String())
	}
	f.unreported = nil
	f.dropIdleLocked()
	return fail(syscall.EIO, "%s; the file keeps its earlier content", strings.Join(texts, "; "))
}
