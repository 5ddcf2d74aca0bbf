package stress

import (
	"encoding/binary"
	"sync/atomic"
	"time"
	"unsafe"
)

// ledger is what one program was promised, in a file outside of the mount that outlives program and daemon. It is
// appended to by the program alone, an entry once the promise is made: after write(2) returned, after the release. A
// mark says that everything before it was made durable.
type ledger struct {
	b []byte
}

const (
	ledgerEntries = 1 << 20
	ledgerEntry   = 16
	ledgerHeader  = 64
	ledgerBytes   = ledgerHeader + ledgerEntries*ledgerEntry

	// markSlot is the slot of an entry that is a mark.
	markSlot = 1<<32 - 1
)

// promise is an entry.
type promise struct {
	slot, number uint32
	at           time.Time
}

func openLedger(path string) (*ledger, error) {
	b, err := mapShared(path, ledgerBytes)
	return &ledger{b}, err
}

// word returns one of the counters at the front, which both sides use at once.
func (l *ledger) word(i int) *atomic.Uint64 { return (*atomic.Uint64)(unsafe.Pointer(&l.b[8*i])) }

// length is the number of entries, begun the highest number that the program stored or began to store anywhere.
func (l *ledger) length() *atomic.Uint64 { return l.word(0) }
func (l *ledger) begun() *atomic.Uint64  { return l.word(1) }

// add appends. It reports false when the ledger is full.
func (l *ledger) add(slot, number uint32) bool {
	n := l.length().Load()
	if n == ledgerEntries {
		return false
	}
	at := l.b[ledgerHeader+n*ledgerEntry:]
	binary.NativeEndian.PutUint32(at, slot)
	binary.NativeEndian.PutUint32(at[4:], number)
	binary.NativeEndian.PutUint64(at[8:], uint64(time.Now().UnixNano()))
	l.length().Store(n + 1)
	return true
}

func (l *ledger) mark() { l.add(markSlot, 0) }

// promises returns the entries, marks included.
func (l *ledger) promises() []promise {
	out := make([]promise, l.length().Load())
	for i := range out {
		at := l.b[ledgerHeader+i*ledgerEntry:]
		out[i] = promise{
			slot:   binary.NativeEndian.Uint32(at),
			number: binary.NativeEndian.Uint32(at[4:]),
			at:     time.Unix(0, int64(binary.NativeEndian.Uint64(at[8:]))),
		}
	}
	return out
}
