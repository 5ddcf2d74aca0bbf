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
// A discipline is one file. FCFS is the first: requests that somebody waits for, in the order in which they came,
// before those for which nobody does. Others are to come: priorities, with and without preemption, and fair shares of
// tenants (Tanasić, chapter 5). That is what Class and Tenant are for; FCFS looks at no tenant.
//
// # What it does not do
//
// It knows no bytes, no device and no file, and does not say how a transfer is carried out.
package schedule
