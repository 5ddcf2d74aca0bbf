package schedule

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// A simulated device carries out calls in the order in which they begin. It needs callTime µs per call, and moves
// linkRate bytes per µs.
const (
	linkRate = 51e3
	callTime = 2
)

// job is a transfer of a simulated client, after a pause in µs.
type job struct {
	bytes int64
	class Class
	think float64
}

// simClient repeats its jobs in a loop.
type simClient struct {
	jobs []job
	// tenant is the client's number.
	at      int
	left    int64   // bytes not yet asked for
	asked   int     // pieces asked for that have not ended: as many as fit in flight, as in the mover
	wakes   float64 // when the next job begins
	began   float64
	runs    int     // how often it completed all jobs
	ran     float64 // how long these runs took
	start   float64
	bytes   int64 // bytes moved
	jobsRun int
	jobTime float64
}

// simulate lets clients run until each has completed so many runs, and returns the time.
func simulate(d Discipline, clients []*simClient, runs int) float64 {
	now, free := 0.0, 0.0
	last := ID(0)
	owner := make(map[ID]int)
	type under struct {
		call []Request
		ends float64
	}
	var fifo []under
	piece := func(i int) {
		c := clients[i]
		if c.left == 0 {
			return
		}
		n := c.left
		if most := d.Piece(); most > 0 {
			n = min(n, most)
		}
		last++
		owner[last] = i
		c.asked++
		c.left -= n
		d.Arrive(Request{ID: last, Class: c.jobs[c.at].class, Size: n, Tenant: uint32(i), Own: true})
	}
	for _, c := range clients {
		*c = simClient{jobs: c.jobs, wakes: c.jobs[0].think}
	}
	for {
		for call := d.Next(); len(call) > 0; call = d.Next() {
			free = max(free, now) + callTime + float64(call[0].Size)/linkRate
			fifo = append(fifo, under{call, free})
		}
		next, who := math.Inf(1), -1
		if len(fifo) > 0 {
			next = fifo[0].ends
		}
		for i, c := range clients {
			if c.asked == 0 && c.wakes < next {
				next, who = c.wakes, i
			}
		}
		now = next
		if who >= 0 {
			c := clients[who]
			c.left, c.began = c.jobs[c.at].bytes, now
			for range InFlight / MostPiece {
				piece(who)
			}
			continue
		}
		u := fifo[0]
		fifo = fifo[1:]
		d.End(u.call)
		r := u.call[0]
		i := owner[r.ID]
		delete(owner, r.ID)
		c := clients[i]
		c.bytes += r.Size
		piece(i)
		if c.asked--; c.asked > 0 {
			continue
		}
		c.jobsRun++
		c.jobTime += now - c.began
		if c.at++; c.at == len(c.jobs) {
			c.at = 0
			c.runs++
			c.ran += now - c.start
			c.start = now
			done := true
			for _, c := range clients {
				done = done && c.runs >= runs
			}
			if done {
				return now
			}
		}
		c.wakes = now + c.jobs[c.at].think
	}
}

// TestUrgentReadBesideSaturatingClients: seven clients keep acquiring 64 MiB. A read of 2 MiB beside them takes at most
// a fifth of its time with FCFS, and the others keep nine tenths of their throughput.
func TestUrgentReadBesideSaturatingClients(t *testing.T) {
	run := func(name string) (turnaround, others float64) {
		clients := []*simClient{{jobs: []job{{2 << 20, CPURead, 1000}}}}
		for range 7 {
			clients = append(clients, &simClient{jobs: []job{{64 << 20, Acquire, 0}}})
		}
		took := simulate(discipline(t, name), clients, 50)
		for _, c := range clients[1:] {
			others += float64(c.bytes)
		}
		return clients[0].jobTime / float64(clients[0].jobsRun), others / took
	}
	slow, all := run("fcfs")
	for _, name := range []string{"preemptive", "preemptive-exclusive", "shares"} {
		quick, rest := run(name)
		t.Logf("%s: %.0f µs instead of %.0f, the rest at %.3f", name, quick, slow, rest/all)
		require.GreaterOrEqual(t, slow/quick, 5.0, name)
		require.GreaterOrEqual(t, rest/all, 0.9, name)
	}
}

// TestPrefetchDelaysNoRead: one tenant's prefetches delay another tenant's read by no more than what is in flight.
func TestPrefetchDelaysNoRead(t *testing.T) {
	for _, name := range []string{"preemptive", "preemptive-exclusive", "shares"} {
		clients := []*simClient{{jobs: []job{{128 << 10, CPURead, 1000}}}}
		for range 3 {
			clients = append(clients, &simClient{jobs: []job{{1 << 30, Prefetch, 0}}})
		}
		simulate(discipline(t, name), clients, 5)
		most := 2*callTime + float64(InFlight)/linkRate + callTime + float64(128<<10)/linkRate
		require.LessOrEqual(t, clients[0].jobTime/float64(clients[0].jobsRun), most, name)
	}
}

// TestSharesByWeight: saturating tenants get shares by weight, whatever the sizes of their transfers. A tenant alone
// gets everything.
func TestSharesByWeight(t *testing.T) {
	weights := []float64{1, 2, 5}
	d := &Shares{Weight: func(tenant uint32) float64 { return weights[tenant] }}
	clients := []*simClient{
		{jobs: []job{{64 << 20, Acquire, 0}}}, {jobs: []job{{5 << 20, Acquire, 0}, {11 << 20, Acquire, 0}}},
		{jobs: []job{{40 << 20, Acquire, 0}}},
	}
	simulate(d, clients, 20)
	for i, c := range clients {
		require.InEpsilon(t, weights[i]/weights[0], float64(c.bytes)/float64(clients[0].bytes), 1.0/3, "tenant %d", i)
	}
	alone := []*simClient{{jobs: []job{{64 << 20, Acquire, 0}}}}
	took := simulate(&Shares{}, alone, 3)
	require.InEpsilon(t, 3*64*(1<<20)/linkRate+3*16*callTime, took, 1e-6)
}

// kernels are those of Tanasić, Table 5.2, by benchmark: how often one is launched, and its duration in µs. Here each
// is a transfer of that duration.
var kernels = map[string][][2]float64{
	"lbm":     {{100, 2905.81}},
	"histo":   {{20, 70.24}, {20, 20.87}, {20, 77.88}, {20, 372.58}},
	"tpacf":   {{1, 14615.33}},
	"spmv":    {{50, 42.38}},
	"mri-q":   {{2, 3389.71}, {1, 4.70}},
	"sad":     {{1, 8174.21}, {1, 1529.38}, {1, 15446.02}},
	"sgemm":   {{1, 3717.18}},
	"stencil": {{100, 2227.30}},
	"cutcp":   {{11, 1520.11}},
	"mri-gridding": {{1, 2021.41}, {9, 7.59}, {8, 826.12}, {8, 127.30}, {1, 2535.30}, {7, 3838.84}, {1, 208398.47},
		{7, 1622.93}, {9, 8.81}},
}

// benchmarks are in the table's order.
var benchmarks = []string{"lbm", "histo", "tpacf", "spmv", "mri-q", "sad", "sgemm", "stencil", "cutcp", "mri-gridding"}

// short are the benchmarks of Class 2 that take less than 5 ms alone, long those that take more than 100 ms.
var (
	short = map[string]bool{"spmv": true, "mri-q": true, "sgemm": true}
	long  = map[string]bool{"lbm": true, "stencil": true, "mri-gridding": true}
)

// smaller is the factor by which transfers are shorter than the kernels, to save simulation time.
const smaller = 8

func benchmark(name string, class Class) *simClient {
	c := &simClient{}
	for _, k := range kernels[name] {
		for range int(k[0]) {
			c.jobs = append(c.jobs, job{int64(k[1] * linkRate / smaller), class, 0})
		}
	}
	return c
}

// workload is benchmarks that run at once. The first is urgent if the discipline supports it.
type workload []string

// result is the outcome of a discipline on a workload, in the terms of Tanasić, 5.3.1.
type result struct {
	ntt             []float64 // turnaround of each, relative to running alone
	antt, stp, fair float64
}

func (w workload) run(t *testing.T, name string, urgent bool) (r result) {
	var clients []*simClient
	for i, b := range w {
		class := Acquire
		if i == 0 && urgent {
			class = CPURead
		}
		clients = append(clients, benchmark(b, class))
	}
	d, err := New(name, nil)
	require.NoError(t, err)
	simulate(d, clients, 1)
	least, most := math.Inf(1), 0.0
	for i, c := range clients {
		alone := benchmark(w[i], Acquire)
		simulate(new(FCFS), []*simClient{alone}, 1)
		ntt := c.ran / float64(c.runs) / alone.ran
		r.ntt = append(r.ntt, ntt)
		r.antt += ntt / float64(len(w))
		r.stp += 1 / ntt
		least, most = min(least, ntt), max(most, ntt)
	}
	r.fair = least / most
	return r
}

// TestShapesOfTanasic checks the findings of chapter 5 for 2 to 8 processes. Priorities help an urgent process, and
// more so with more other processes. Preemption helps it far more. Fair shares cut the average turnaround and increase
// fairness, more so with more processes; they help short processes more than long ones, and cost some throughput.
func TestShapesOfTanasic(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 2))
	type shape struct{ npq, ppq, antt, fair, stp, short, long float64 } // geometric means
	var shapes []shape
	for _, n := range []int{2, 4, 6, 8} {
		var logs shape
		shorts, longs := 0.0, 0.0
		for i := range benchmarks { // each benchmark is the first one once
			w := workload{benchmarks[i]}
			for _, k := range rnd.Perm(len(benchmarks)) {
				if k != i && len(w) < n {
					w = append(w, benchmarks[k])
				}
			}
			fcfs, shares := w.run(t, "fcfs", false), w.run(t, "shares", false)
			logs.npq += math.Log(fcfs.ntt[0] / w.run(t, "priority", true).ntt[0])
			logs.ppq += math.Log(fcfs.ntt[0] / w.run(t, "preemptive", true).ntt[0])
			logs.antt += math.Log(fcfs.antt / shares.antt)
			logs.fair += math.Log(shares.fair / fcfs.fair)
			logs.stp += math.Log(shares.stp / fcfs.stp)
			for i, b := range w {
				gain := math.Log(fcfs.ntt[i] / shares.ntt[i])
				if short[b] {
					logs.short, shorts = logs.short+gain, shorts+1
				}
				if long[b] {
					logs.long, longs = logs.long+gain, longs+1
				}
			}
		}
		of := func(sum, n float64) float64 { return math.Exp(sum / n) }
		all := float64(len(benchmarks))
		s := shape{of(logs.npq, all), of(logs.ppq, all), of(logs.antt, all), of(logs.fair, all), of(logs.stp, all),
			of(logs.short, shorts), of(logs.long, longs)}
		t.Logf("%d processes: urgent ×%.2f, preemptive ×%.2f; shares: ANTT ×%.2f, fairness ×%.2f, STP ×%.2f, short ×%.2f, long ×%.2f",
			n, s.npq, s.ppq, s.antt, s.fair, s.stp, s.short, s.long)
		shapes = append(shapes, s)
	}
	require.InDelta(t, 1, shapes[0].npq, 0.01, "with two there is no choice")
	for i, s := range shapes {
		require.Greater(t, s.ppq, 1.3*s.npq)
		require.Greater(t, s.antt, 1.0)
		require.Greater(t, s.fair, 1.0)
		require.Greater(t, s.short, s.long)
		require.InDelta(t, 0.95, s.stp, 0.05, "the cost of pieces")
		if i > 0 {
			require.Greater(t, s.npq, shapes[i-1].npq)
			require.Greater(t, s.ppq, shapes[i-1].ppq)
			require.Greater(t, s.fair, shapes[i-1].fair)
			require.Greater(t, s.antt, shapes[0].antt)
		}
	}
}

// TestSharesBesideSmallRequests: a tenant with many small requests takes nothing from the parts of others with large
// ones, even if these are so many that none has tokens for a whole piece.
func TestSharesBesideSmallRequests(t *testing.T) {
	for _, others := range []int{1, 2, 3, 7} {
		d, last, waits := &Shares{}, ID(0), make(map[uint32]int)
		served := make(map[uint32]int64)
		var fifo [][]Request
		for range 4000 {
			for tenant := range uint32(others + 1) {
				size, most := int64(MostPiece), 3
				if tenant == 0 {
					size, most = 64<<10, 8
				}
				for ; waits[tenant] < most; waits[tenant]++ {
					last++
					d.Arrive(Request{ID: last, Class: Acquire, Size: size, Tenant: tenant, Own: true})
				}
			}
			for call := d.Next(); len(call) > 0; call = d.Next() {
				fifo = append(fifo, call)
			}
			r := fifo[0][0]
			served[r.Tenant] += r.Size
			waits[r.Tenant]--
			d.End(fifo[0])
			fifo = fifo[1:]
		}
		for tenant := range uint32(others) {
			require.GreaterOrEqual(t, served[tenant+1], served[0]*9/10, "%v", served)
		}
	}
}
