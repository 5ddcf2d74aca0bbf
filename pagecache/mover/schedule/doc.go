// Package schedule decides which transfers of a device begin next.
//
// It is pure: no clock, no goroutine, no lock, no I/O. Calls tell a Discipline what happens, and it answers what
// begins. Package mover carries that out. A simulation does the same with requests and a clock of its own, so
// disciplines are tested and compared without a device (transcripts under testdata, and a slow, obvious twin).
//
// # States of a request
//
//	            Arrive            Next             End
//	unknown ──────────▶ waits ──────────▶ begun ──────────▶ unknown
//	                    │   ▲
//	           Withdraw │   │ Promote (from now on somebody waits for it)
//	                    ▼   │
//	                  unknown
//
// A request begins once and ends once. After it has begun, it cannot be withdrawn, and Promote has no effect. All
// requests that one call of Next returns are one call of the device, and end with it.
//
// # Disciplines
//
// Each discipline has its own file.
//
// FCFS serves requests that somebody waits for, in order of arrival, before those that nobody waits for. A caller that
// makes the call itself begins at once. Transfers are not cut. This costs nothing while the device is not crowded.
//
// The others bound the bytes and calls in flight, so that later requests may overtake earlier ones. Only calls of the
// same class and of more urgent ones count: a request never waits until less urgent calls have ended. These disciplines
// follow Tanasić, chapter 5, whose tokens are multiprocessors; here they are bytes in flight. Priority serves the most
// urgent class. If it is preemptive, transfers come in pieces, so on the device an urgent one is behind the pieces in
// flight, not behind whole transfers. Shares gives each tenant a part of the bytes in flight by weight. A tenant may go
// into debt and take more if no other tenant with tokens for its request waits.
//
// Except for FCFS, no discipline lets a request starve: a request that was overtaken by mostPassed bytes is next. FCFS
// serves requests that nobody waits for only when there are no others.
//
// # What it does not do
//
// It knows no bytes, no device and no file, and does not say how a transfer is carried out.
package schedule
