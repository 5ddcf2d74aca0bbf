// Package replay scores predictors of package prefetch on traces: it plays the accesses against a model of the way that
// bytes take, and counts hits, bytes that nobody used, and time.
//
// # The programs
//
// Each source of a trace makes its accesses one after the other. An access waits until all its pages are there; the
// next one follows after as much time as passed between the two in the recording. So a source that waits less gets
// further, and the order in which sources meet comes out of the replay, not of the recording.
//
// # The way of the bytes
//
// A request is a run of pages that are not there; what an access lacks is requested first, then what the predictor asks
// for. Requests pass the stages of a Model one after the other, in pieces of at most Model.Piece. A stage has a
// latency, of which as many pass at once as it is deep, and a pipe that carries one piece after the other: a time per
// piece, and the bytes at its bandwidth. All is first come, first served, and a page is there when its piece has passed
// the last stage.
//
// # What it does not do
//
// Memory has no end here, and no page is evicted: a predictor that reads too much pays with the bandwidth that it takes
// from others. An access to a page that is there costs nothing. Writes of a trace are left out.
package replay
