package schedule

// Class says what a transfer is for. Lower classes are more urgent.
type Class uint8

const (
	// Fault brings what a kernel on a device waits for.
	Fault Class = iota
	// CPURead brings what a read of a CPU program waits for.
	CPURead
	// Acquire brings replicas up to date for a program that waits in an acquire or in a map.
	Acquire
	// Prefetch brings what may be needed soon. Nobody waits for it.
	Prefetch
	// WriteBack brings home what devices released, and makes replicas agree with home.
	WriteBack
	// Eviction empties memory that is needed for something else.
	Eviction
)

var classNames = [...]string{"fault", "cpu-read", "acquire", "prefetch", "write-back", "eviction"}

func (c Class) String() string { return classNames[c] }

// Classes returns all classes, most urgent first.
func Classes() []Class { return []Class{Fault, CPURead, Acquire, Prefetch, WriteBack, Eviction} }

// ID names a request. IDs ascend in order of arrival.
type ID uint64

// Request is a transfer that wants to begin.
type Request struct {
	ID    ID
	Class Class
	// Size is the number of bytes that it moves over the link.
	Size int64
	// Tenant is the user on whose behalf the transfer is, 0 for nobody in particular.
	Tenant uint32
	// After is an earlier piece of the same transfer, or 0. A piece has the place in line that the earlier one had, so
	// the transfer goes on before later ones of its class begin. Its requester is running, and need not be woken.
	After ID
	// Own means that the requester makes the device's call itself. So the request shares its call with no other.
	Own bool
}

// Discipline decides the order of one device's requests. Its calls must not overlap.
type Discipline interface {
	// Arrive adds a request, which then waits.
	Arrive(r Request)
	// Promote says that somebody now waits for a request. If the request has begun or is unknown, it does nothing.
	Promote(id ID)
	// Withdraw takes back a waiting request. It returns false if the request has begun or is unknown.
	Withdraw(id ID) bool
	// Next returns the requests that begin now as one call of the device. It returns none if nothing may begin until
	// another method is called. Call it after each call of another method, until it returns none.
	Next() (call []Request)
	// End says that a call has ended that Next returned, or that Resume was told of.
	End(call []Request)
	// Resume tells a Discipline that replaces another one of a call in progress.
	Resume(call []Request)
	// Piece returns the most bytes that one request may have. Larger transfers come in pieces. 0 means any size.
	Piece() int64
}
