package schedule

// Class says what a transfer is for. The lower ones are more urgent.
type Class uint8

const (
	// Fault brings what a kernel on a device stands still for.
	Fault Class = iota
	// CPURead brings what a read of a program on the CPU waits for.
	CPURead
	// Acquire brings replicas up to date for a program that waits in an acquire or in a map.
	Acquire
	// Prefetch brings what may be wanted soon. Nobody waits for it.
	Prefetch
	// WriteBack brings what devices released home, and makes replicas agree with home.
	WriteBack
	// Eviction empties memory that somebody else is to have.
	Eviction
)

var classNames = [...]string{"fault", "cpu-read", "acquire", "prefetch", "write-back", "eviction"}

func (c Class) String() string { return classNames[c] }

// Classes returns all classes, the most urgent first.
func Classes() []Class { return []Class{Fault, CPURead, Acquire, Prefetch, WriteBack, Eviction} }

// ID names a request. Whoever makes requests gives each a higher one than the last, so IDs are in the order of arrival.
type ID uint64

// Request is a transfer that wants to begin.
type Request struct {
	ID    ID
	Class Class
	// Size is the bytes that it moves.
	Size int64
	// Tenant is the user on whose behalf that is, 0 for nobody in particular.
	Tenant uint32
	// Own says that whoever asks makes the call of the device himself, so that it goes together with no other
	// request.
	Own bool
}

// Discipline decides the order of one device's requests. Its calls must not overlap.
type Discipline interface {
	// Arrive adds a request, which waits then.
	Arrive(r Request)
	// Promote says that somebody waits for a request for which nobody did. Of one that has begun, or is unknown, it
	// does nothing.
	Promote(id ID)
	// Withdraw takes back a request that waits. It returns false where it has begun, or is unknown.
	Withdraw(id ID) bool
	// Next returns the requests that begin now as one call of the device; none where nothing may begin until one of
	// the other methods was called. It is to be called after each of them, until it returns none.
	Next() (call []Request)
	// End says that a call that Next returned, or Resume was told of, has ended.
	End(call []Request)
	// Resume tells a Discipline that takes the place of another one of a call that is under way.
	Resume(call []Request)
	// Piece is the most bytes that a transfer may have in one request; what is larger is to come in pieces, one after
	// the other. 0 stands for any size.
	Piece() int64
}
