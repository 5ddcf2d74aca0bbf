// Package replay scores predictors of package prefetch on traces. It replays the accesses against a model of the path
// that bytes take, and counts hits, unused bytes, and time.
//
// # The programs
//
// Each source of a trace makes its accesses one after the other. An access waits until all its pages have arrived. The
// next one follows after the same pause as in the recording. So a source that waits less gets further, and the replay,
// not the recording, decides how the accesses of sources interleave.
//
// # The path of the bytes
//
// A request is a run of pages that were not requested before. The pages that an access lacks are requested first, then
// what the predictor proposes. Requests pass the stages of a Model in order, in pieces of at most Model.Piece bytes. A
// stage has a latency, which up to Depth pieces spend at the same time, and a pipe, which carries one piece after the
// other: a fixed time per piece, and its bytes at the bandwidth. Everything is first come, first served. A page arrives
// when its piece has passed the last stage.
//
// # What it does not do
//
// Memory is unlimited here, and no page is evicted: a predictor that reads too much pays with the bandwidth that it
// takes from others. An access to a page that has arrived costs nothing. Writes in a trace are ignored.
package replay
