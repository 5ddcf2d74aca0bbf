package lrc

// planKind is the kind of a plan.
type planKind uint8

const (
	writing planKind = iota
	collecting
	acquiring
	exposing
	truncating
	comparing
	releasing
	evicting
	draining
)

func (k planKind) String() string {
	return [...]string{"write", "collect", "acquire", "expose", "truncate", "compare", "release", "evict", "drain"}[k]
}
