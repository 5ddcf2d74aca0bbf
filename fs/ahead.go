package fs

import (
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// ahead reads ahead across files. When programs read the small files of a directory one after the other, ahead brings
// the next ones into the host's page cache before they are asked for. Without it, each file would take requests and a
// wait for the disk in turn: the kernel's own read-ahead ends with the file.
//
// A directory is read in order if the last few files read there are near each other in one of three orders: by name
// with numbers counted as numbers, by name, and as the directory lists its names. Several readers that take turns look
// like one reader with small steps. Files read without order are left alone, and so are files that the host has cached.
// A directory is looked at afresh after as many reads as it has files, because programs read data sets again and again.
//
// Only regular files are opened. As any open does, this breaks a lease (fcntl(2)) on the file, and asks programs that
// must permit opens (fanotify(7)). Those see the daemon open files that no program has asked for yet.
//
// Rejected: pushing the bytes into the kernel's cache of the mount, so that no request is left. It took as much
// processor time as the requests, came later, and could meet a change in SOURCE.
type ahead struct {
	fs *fileSystem

	mu   sync.Mutex
	dirs map[*node]*aheadDir // protected by mu
	// the order to try first in the next directory, or noOrder; protected by mu
	trusted int
	listing bool // a directory is being listed; protected by mu

	running sync.WaitGroup
	ending  atomic.Bool
	fetched atomic.Int64 // files that the host was asked to read
}

const (
	// aheadLargest is the largest file that is read ahead, and the largest read that shows that a file is small, in
	// bytes.
	aheadLargest = maxRead
	// aheadNear is how many places apart in an order consecutive reads may be.
	aheadNear = 16
	// aheadTold is how many files must be read in a directory before its order is known.
	aheadTold = 3
	// aheadFirst is how many files the first batch reads ahead, aheadMost how many any batch does.
	aheadFirst, aheadMost = 32, 256
	// aheadBytes bounds the bytes of one batch.
	aheadBytes = 8 << 20
	// aheadDirs is how many directories are followed at a time. aheadNames bounds the names of one directory,
	// aheadAllNames those of all directories. A name takes some 300 bytes.
	aheadDirs, aheadNames, aheadAllNames = 64, 1 << 14, 1 << 17
	// aheadProbe is how many cached files in a row stop read-ahead in a directory.
	aheadProbe = 8
)

// noOrder marks a directory with no known order.
const noOrder = -1

// aheadDir is a directory in which files are read. All fields are protected by ahead.mu.
type aheadDir struct {
	used    time.Time
	last    []string // the last files read, aheadTold at most
	reads   int
	listing bool         // is being listed, or has been
	trusts  bool         // its order was chosen before enough files were read
	skip    int          // reads to ignore before the directory is looked at afresh
	orders  []aheadOrder // nil before the directory was listed, and while skip is not 0
	order   int
	next    int // place in the order of the first file that was not asked for
	window  int
	busy    bool // a batch is being read
}

// aheadOrder is the names of a directory in one order, and the place of each. It is immutable.
type aheadOrder struct {
	names []string
	at    map[string]int
}

func newAhead(fs *fileSystem) *ahead {
	return &ahead{fs: fs, dirs: make(map[*node]*aheadDir), trusted: noOrder}
}

// close ends reading ahead and waits for it. No request may be under way.
func (a *ahead) close() {
	a.ending.Store(true)
	a.running.Wait()
}

// read notes that a program reads the small file n from its beginning, with bytes from home.
func (a *ahead) read(n *node) {
	n.mu.Lock()
	where := n.where
	n.mu.Unlock()
	if where.parent == nil || a.fs.remote || a.fs.mayHang(n) || a.fs.mayHang(where.parent) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	d := a.dirLocked(where.parent)
	d.used = time.Now()
	if d.skip > 0 {
		if d.skip--; d.skip == 0 {
			delete(a.dirs, where.parent)
		}
		return
	}
	if slices.Contains(d.last, where.name) {
		return // to read a file again is no step to the next one
	}
	d.reads++
	if len(d.last) == aheadTold {
		d.last = append(d.last[:0], d.last[1:]...)
	}
	d.last = append(d.last, where.name)
	switch {
	case d.orders != nil:
		a.stepLocked(where.parent, d)
	case !d.listing && !a.listing && (d.reads >= aheadTold || a.trusted != noOrder):
		d.listing, a.listing = true, true
		a.running.Go(func() { a.list(where.parent, d) })
	}
}

// dirLocked returns the entry of a directory, and makes one if there is none. If there are too many, it forgets the
// least recently used one.
func (a *ahead) dirLocked(n *node) *aheadDir {
	if d := a.dirs[n]; d != nil {
		return d
	}
	if len(a.dirs) >= aheadDirs {
		var oldest *node
		for n, d := range a.dirs {
			if oldest == nil || d.used.Before(a.dirs[oldest].used) {
				oldest = n
			}
		}
		delete(a.dirs, oldest)
	}
	d := &aheadDir{order: noOrder, window: aheadFirst}
	a.dirs[n] = d
	return d
}

// rest ignores the directory for so many reads.
func (d *aheadDir) rest(reads int) { d.skip, d.orders = max(reads, 1), nil }

// boundLocked forgets the least recently used directories, except d, until all have at most aheadAllNames names.
func (a *ahead) boundLocked(d *aheadDir) {
	for {
		names, oldest := len(d.orders[0].names), (*node)(nil)
		for n, other := range a.dirs {
			if other == d || other.orders == nil {
				continue
			}
			names += len(other.orders[0].names)
			if oldest == nil || other.used.Before(a.dirs[oldest].used) {
				oldest = n
			}
		}
		if names <= aheadAllNames || oldest == nil {
			return
		}
		delete(a.dirs, oldest)
	}
}

// stepLocked reads ahead after a read in a listed directory. It trusts the order of the last directory once; if enough
// files of this directory are read in that order, the order is trusted again. So a program that reads one file of each
// directory causes no more than one wrong guess.
func (a *ahead) stepLocked(n *node, d *aheadDir) {
	if d.order == noOrder || d.spread(d.order) > aheadNear {
		d.order, d.next = d.chooseOrder(a.trusted), 0
		if len(d.last) < aheadTold {
			a.trusted, d.trusts = noOrder, true
		}
	} else if d.trusts && len(d.last) == aheadTold {
		a.trusted, d.trusts = d.order, false
	}
	if d.order == noOrder {
		if d.reads > aheadNear {
			d.rest(len(d.orders[0].names))
			a.trusted = noOrder
		}
		return
	}
	names, at := d.orders[d.order].names, d.orders[d.order].at[d.last[len(d.last)-1]]
	d.next = max(d.next, at+1)
	if d.busy || at+d.window/2 < d.next {
		return
	}
	if d.next == len(names) {
		d.rest(len(names) - at - 1)
		a.trusted = d.order
		return
	}
	batch := names[d.next:min(d.next+d.window, len(names))]
	d.busy = true
	order, begin := d.order, d.next
	a.running.Go(func() { a.fetch(n, d, order, begin, batch) })
}

// chooseOrder returns the order in which the last files were read, or noOrder. For the trusted order of the last
// directory, the first files of that order are enough.
func (d *aheadDir) chooseOrder(trusted int) int {
	best, least := noOrder, aheadNear+1
	for i := range d.orders {
		if spread := d.spread(i); spread < least && (len(d.last) == aheadTold || i == trusted) {
			best, least = i, spread
		}
	}
	return best
}

// spread returns how many places apart the last files are in an order; if there are fewer than aheadTold, it counts
// from the order's beginning. It is more than aheadNear if one of the files is not in the order.
func (d *aheadDir) spread(order int) int {
	least, most := math.MaxInt, 0
	for _, name := range d.last {
		at, known := d.orders[order].at[name]
		if !known {
			return aheadNear + 1
		}
		least, most = min(least, at), max(most, at)
	}
	if len(d.last) < aheadTold {
		least = 0
	}
	return most - least
}

// list lists a directory, and reads ahead in it if programs read it in order.
func (a *ahead) list(n *node, d *aheadDir) {
	orders := a.ordersOf(n)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listing = false
	if d.orders = orders; orders == nil {
		d.rest(math.MaxInt)
		return
	}
	a.boundLocked(d)
	a.stepLocked(n, d)
}

// ordersOf returns the names of the regular files in a directory in each order. It returns nil if there are too many,
// or if the directory cannot be listed.
func (a *ahead) ordersOf(n *node) []aheadOrder {
	d, err := a.fs.openDirectory(n, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOATIME)
	if err != nil {
		return nil
	}
	defer d.close()
	var listed []string
	buf := make([]byte, direntBuffer)
	for {
		size, err := unix.Getdents(d.fd, buf)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil
		}
		if size == 0 {
			break
		}
		for b := buf[:size]; len(b) > 0; {
			e := parseDirent(b)
			if e.kind == unix.DT_REG {
				listed = append(listed, string(e.name))
			}
			b = b[e.size:]
		}
		if len(listed) > aheadNames {
			return nil
		}
	}
	byName, byNumber := slices.Clone(listed), slices.Clone(listed)
	slices.Sort(byName)
	slices.SortFunc(byNumber, compareNumbers)
	orders := []aheadOrder{{names: byNumber}, {names: byName}, {names: listed}}
	for i := range orders {
		o := &orders[i]
		o.at = make(map[string]int, len(o.names))
		for at, name := range o.names {
			o.at[name] = at
		}
	}
	return orders
}

// compareNumbers orders names with numbers by value: f9 comes before f10.
func compareNumbers(a, b string) int {
	x, y := a, b
	for x != "" && y != "" {
		p, q := digits(x), digits(y)
		if p == 0 || q == 0 {
			if x[0] != y[0] {
				return int(x[0]) - int(y[0])
			}
			x, y = x[1:], y[1:]
			continue
		}
		v, w := strings.TrimLeft(x[:p], "0"), strings.TrimLeft(y[:q], "0")
		if len(v) != len(w) {
			return len(v) - len(w)
		}
		if c := strings.Compare(v, w); c != 0 {
			return c
		}
		x, y = x[p:], y[q:]
	}
	if len(x) != len(y) {
		return len(x) - len(y)
	}
	return strings.Compare(a, b)
}

// digits returns how many digits s begins with.
func digits(s string) int {
	n := 0
	for n < len(s) && '0' <= s[n] && s[n] <= '9' {
		n++
	}
	return n
}

// fetch makes the host read the named files of a directory. The first is at begin in the order.
func (a *ahead) fetch(n *node, d *aheadDir, order, begin int, names []string) {
	done, useless := a.fetchNames(n, names)
	a.mu.Lock()
	defer a.mu.Unlock()
	d.busy = false
	if d.order == order { // programs may have read further in the meantime
		d.next = max(d.next, begin+done)
	}
	d.window = min(2*d.window, aheadMost)
	if useless && d.orders != nil {
		d.rest(len(d.orders[0].names))
	}
}

// fetchNames reads files ahead until aheadBytes are reached, and returns how many names it handled. useless reports
// that the host has the files already, or that the directory is gone.
func (a *ahead) fetchNames(n *node, names []string) (done int, useless bool) {
	dir, errno := a.fs.hold(n)
	if errno != 0 {
		return 0, true
	}
	defer a.fs.unhold(n)
	had, bytes := 0, int64(0)
	for i, name := range names {
		if a.ending.Load() { // each file may take the disk a while
			return i, true
		}
		size, cached := a.fetchName(n, dir, name)
		if had++; !cached {
			had = 0
		}
		if bytes += size; had == aheadProbe || bytes > aheadBytes {
			return i + 1, had == aheadProbe
		}
	}
	return len(names), false
}

// fetchName makes the host start reading a file, unless the file is large or cached already.
func (a *ahead) fetchName(n *node, dir int, name string) (size int64, cached bool) {
	fd, size, ok := a.openSmall(n, dir, name)
	if !ok {
		return 0, false
	}
	defer unix.Close(fd)
	if cached, _ := isCached(fd, 0, size); cached {
		return 0, true
	}
	a.fetched.Add(1)
	_ = unix.Fadvise(fd, 0, size, unix.FADV_WILLNEED)
	return size, false
}

// openSmall opens a small regular file of the directory n, whose descriptor is dir. It opens nothing else, even if the
// name is replaced during the call: opening a device has side effects.
func (a *ahead) openSmall(n *node, dir int, name string) (fd int, size int64, ok bool) {
	path, err := a.fs.openat(dir, name, unix.O_PATH|unix.O_NOFOLLOW, 0)
	if err != nil {
		return -1, 0, false
	}
	defer unix.Close(path)
	var st unix.Statx_t
	foreign, err := a.fs.statxIn(n, path, "", &st)
	if err != nil || foreign || st.Mode&unix.S_IFMT != unix.S_IFREG || st.Size == 0 || st.Size > aheadLargest {
		return -1, 0, false
	}
	fd, err = a.fs.openat(a.fs.procDir, strconv.Itoa(path), unix.O_RDONLY|unix.O_NONBLOCK, 0)
	return fd, int64(st.Size), err == nil
}
