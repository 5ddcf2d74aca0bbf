package monitor

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gaiafs/gaiafs/pagecache"
)

// collector converts a snapshot to Prometheus metrics.
type collector struct{ snapshot func() *Snapshot }

var (
	metricDescs    = make([]*prometheus.Desc, len(metrics))
	histogramDescs = make([]*prometheus.Desc, len(histograms))
)

func init() {
	plain := func(help string) string { return strings.ReplaceAll(help, "`", "") }
	for i, m := range metrics {
		metricDescs[i] = prometheus.NewDesc(m.name, plain(m.help), m.labels, nil)
	}
	for i, h := range histograms {
		histogramDescs[i] = prometheus.NewDesc(h.name, plain(h.help), []string{h.label}, nil)
	}
}

// Describe implements prometheus.Collector.
func (c collector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range append(metricDescs[:len(metricDescs):len(metricDescs)], histogramDescs...) {
		to <- d
	}
}

// Collect implements prometheus.Collector.
func (c collector) Collect(to chan<- prometheus.Metric) {
	s := c.snapshot()
	for i, m := range metrics {
		m.values(s, func(v float64, labels ...string) {
			to <- made(prometheus.NewConstMetric(metricDescs[i], m.kind, v, labels...))(metricDescs[i])
		})
	}
	for i, h := range histograms {
		for label, l := range h.of(s) {
			sum := l.Mean * float64(l.Count) / 1e6
			to <- made(prometheus.NewConstHistogram(histogramDescs[i], uint64(l.Count), sum, buckets(l), label))(
				histogramDescs[i])
		}
	}
}

// made turns a metric that could not be made, for instance because a device name is not valid text, into an error of
// the scrape instead of a panic.
func made(m prometheus.Metric, err error) func(*prometheus.Desc) prometheus.Metric {
	return func(d *prometheus.Desc) prometheus.Metric {
		if err != nil {
			return prometheus.NewInvalidMetric(d, err)
		}
		return m
	}
}

// mostBucket is the bound of the last bucket, as a power of two in microseconds: 17 s.
const mostBucket = 24

// buckets returns how many durations were below each bound, in seconds. It uses every other bound of pagecache.
func buckets(l pagecache.Latency) map[float64]uint64 {
	bounds, below := make(map[float64]uint64), uint64(0)
	for i := range mostBucket + 1 {
		if i < len(l.Buckets) {
			below += uint64(l.Buckets[i])
		}
		if i%2 == 0 {
			bounds[float64(int64(1)<<i)/1e6] = below
		}
	}
	return bounds
}
