package pagecache

import (
	"context"
	"sync"
	"sync/atomic"
)

// A group's release publishes pages of several files (group.go), one File after the other. Its version is the number of
// that publication. Readers see all of it or none. If a group is published during an acquire, the acquire starts again,
// and then finds little left to do. After a few such turns the next group waits for the acquire.
//
// publications counts versions, for all files of a Cache.
type publications struct {
	mu   sync.Mutex
	last uint64 // the newest version; protected by mu
	// left has the versions of files that no device holds. Protected by mu.
	left map[FileID]uint64
	// moved is closed when any of this, or a File's publication, changes; nil while nobody waits. Protected by mu.
	moved chan struct{}
}

// publication is the state of one file's groups.
type publication struct {
	// state is twice the version of the last published group, 0 if there was none, plus one while a group is being
	// published. It is changed with publications.mu held.
	state atomic.Uint64
	// steady counts acquires that groups wait for, writers counts mappings that have begun groups, and ends how often
	// the last writer ended. Protected by publications.mu.
	steady, writers int
	ends            uint64
}

// mostLeft is the most files without a File whose versions are kept.
const mostLeft = 1 << 16

// steadyTurn is the turn of an acquire from which groups wait for it.
const steadyTurn = 2

func (p *publications) movedLocked() {
	if p.moved != nil {
		close(p.moved)
		p.moved = nil
	}
}

// until waits until ready returns true. It calls ready with mu held, and waits without. It returns the error of ready
// or of ctx.
func (p *publications) until(ctx context.Context, ready func() (bool, error)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		if ok, err := ready(); ok || err != nil {
			return err
		}
		if p.moved == nil {
			p.moved = make(chan struct{})
		}
		moved := p.moved
		p.mu.Unlock()
		var err error
		select {
		case <-moved:
		case <-ctx.Done():
			err = ctx.Err()
		}
		if p.mu.Lock(); err != nil {
			return err
		}
	}
}

// begin waits until no group of the files is being published and no acquire is steady. From then on a group of them is
// being published, until end.
func (p *publications) begin(ctx context.Context, files []*File) error {
	return p.until(ctx, func() (bool, error) {
		for _, f := range files {
			if f.published.steady > 0 || f.published.state.Load()&1 != 0 {
				return false, nil
			}
		}
		for _, f := range files {
			f.published.state.Add(1)
		}
		return true, nil
	})
}

// end ends the publication of a group. If it was published, the files get its version; otherwise they keep theirs.
func (p *publications) end(files []*File, published bool) (version uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer p.movedLocked()
	if published {
		p.last++
	}
	for _, f := range files {
		if published {
			f.published.state.Store(2 * p.last)
		} else {
			f.published.state.Add(^uint64(0))
		}
	}
	return p.last
}

// look adds up the states of files and finds the newest version. A published group makes the sum grow.
func look(files []*File) (sum, version uint64, publishing bool) {
	for _, f := range files {
		state := f.published.state.Load()
		sum, version, publishing = sum+state, max(version, state/2), publishing || state&1 != 0
	}
	return sum, version, publishing
}

// between waits until no group of the files is being published, and returns the results of look. With steady, no group
// of them is published from then on until unsteady.
func (p *publications) between(ctx context.Context, files []*File, steady bool) (sum, version uint64, err error) {
	var publishing bool
	if !steady {
		if sum, version, publishing = look(files); !publishing {
			return sum, version, nil
		}
	}
	err = p.until(ctx, func() (bool, error) {
		if sum, version, publishing = look(files); publishing {
			return false, nil
		}
		if steady {
			for _, f := range files {
				f.published.steady++
			}
		}
		return true, nil
	})
	return sum, version, err
}

func (p *publications) unsteady(files []*File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range files {
		f.published.steady--
	}
	p.movedLocked()
}

// atOneVersion calls acquire, which brings bytes of files up to date and returns the number of pages, until no group of
// the files is published during the call. Then the bytes have all of each group up to version, and nothing of later
// ones.
func (c *Cache) atOneVersion(ctx context.Context, files []*File, acquire func() (pages int64,
	err error)) (version uint64, pages int64, err error) {
	for turn := 0; ; turn++ {
		steady := turn == steadyTurn
		before, version, err := c.publications.between(ctx, files, steady)
		if err != nil {
			return 0, pages, err
		}
		n, err := acquire()
		pages += n
		if steady {
			c.publications.unsteady(files)
			return version, pages, err
		}
		if after, _, _ := look(files); err != nil || after == before {
			return version, pages, err
		}
	}
}

// ends returns how often the last writer of a file ended, for all the files. publications.mu is held.
func ends(files []*File) (n uint64) {
	for _, f := range files {
		n += f.published.ends
	}
	return n
}

// start starts the lifetime of a window of files. It notes how often their last writers have ended.
func (p *publications) start(l *lifetime, files []*File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	l.start()
	l.saw = ends(files)
}

// wrote counts one more mapping of the file that has begun groups, or with -1 the end of such a mapping.
func (p *publications) wrote(f *File, mappings int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.published.writers += mappings
	if mappings < 0 && f.published.writers == 0 {
		f.published.ends++
	}
	p.movedLocked()
}

// meet gives a new File the version that its file had.
func (p *publications) meet(f *File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f.published.state.Store(2 * p.left[f.id])
}

// leave keeps the version of a File that is going away.
func (p *publications) leave(f *File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	version := f.published.state.Load() / 2
	if version == 0 {
		return
	}
	for id := range p.left {
		if len(p.left) < mostLeft {
			break
		}
		delete(p.left, id)
	}
	if p.left == nil {
		p.left = make(map[FileID]uint64)
	}
	p.left[f.id] = version
}

// forget drops the version of a deleted file.
func (p *publications) forget(id FileID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.left, id)
}

// Version returns the version of the file's last published group, 0 if there was none. It waits while a group is being
// published.
func (f *File) Version(ctx context.Context) (uint64, error) {
	_, version, err := f.c.publications.between(ctx, []*File{f}, false)
	return version, err
}
