// Package schedule decides which transfers of a device begin next.
//
// It is pure: no clock, no goroutine, no lock, no I/O. What happens is told to a Discipline by calls, and it answers
// what begins. Package mover carries that out. A simulation does the same with requests of its own and a clock of its
// own, so a discipline is tested and compared without a device (transcripts under testdata, and a slow obvious twin).
//
// # States of a request
//
//	            Arrive            Next             End
//	unknown ──────────▶ waits ──────────▶ begun ──────────▶ unknown
//	                    │   ▲
//	           Withdraw │   │ Promote (it waits among those that somebody waits for)
//	                    ▼   │
//	                  unknown
//
// A request begins once and ends once. What has begun cannot be withdrawn, and Promote does nothing to it. Every
// request that Next returned in one call of Next makes up one call of the device, and ends with it.
//
// # Disciplines
//
// A discipline is one file.
//
// FCFS serves requests that somebody waits for, in the order in which they came, before those for which nobody does.
// Who makes the call himself begins at once, and transfers are made whole: it costs nothing where the device is not
// crowded.
//
// The others bound the bytes in flight, so that what comes later may begin before what came earlier. They follow
// Tanasić, chapter 5, where tokens are multiprocessors; here they are bytes in flight. Priority serves the most urgent
// class. When it is preemptive, transfers come in pieces, so that an urgent one waits for the pieces in flight, and not
// for whole transfers. Shares gives each tenant a part of the bytes in flight by its weight. A tenant goes into debt,
// and takes more, where nobody else waits who has tokens left.
//
// No discipline lets a request starve: what mostPassed bytes have passed goes next.
//
// # What it does not do
//
// It knows no bytes, no device and no file, and does not say how a transfer is carried out.
package schedule
