package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
)

// The types below are flag values (pflag.Value) that reject senseless values.

// size is a number of bytes; 0 leaves the choice to gaiafs.
type size int64

// units are the units of a size. A single letter is a power of 1024, as is usual for GPU memory.
var units = map[string]float64{
	"": 1, "B": 1,
	"K": 1 << 10, "KIB": 1 << 10, "KB": 1e3,
	"M": 1 << 20, "MIB": 1 << 20, "MB": 1e6,
	"G": 1 << 30, "GIB": 1 << 30, "GB": 1e9,
	"T": 1 << 40, "TIB": 1 << 40, "TB": 1e12,
}

func (s *size) Set(text string) error {
	trimmed := strings.TrimSpace(text)
	end := strings.LastIndexAny(trimmed, "0123456789.") + 1
	number, err := strconv.ParseFloat(trimmed[:end], 64)
	unit, ok := units[strings.ToUpper(strings.TrimSpace(trimmed[end:]))]
	bytes := number * unit
	if err != nil || !ok || !(bytes >= 0 && bytes < math.MaxInt64) {
		return fmt.Errorf("%q is not a size; write one such as 512M, 1.5G or 2GiB", text)
	}
	*s = size(bytes)
	return nil
}

func (s *size) String() string {
	if *s == 0 {
		return "auto"
	}
	return strings.ReplaceAll(humanize.IBytes(uint64(*s)), " ", "")
}

func (s *size) Type() string { return "SIZE" }

// budget is a size, or auto, which lets gaiafs choose.
type budget struct{ size }

func (b *budget) Set(text string) error {
	if strings.EqualFold(strings.TrimSpace(text), "auto") {
		b.size = 0
		return nil
	}
	return b.size.Set(text)
}

// percentage is a part of something, at least 1 %.
type percentage int

func (p *percentage) Set(text string) error {
	n, err := strconv.Atoi(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(text), "%")))
	if err != nil || n < 1 || n > 100 {
		return fmt.Errorf("%q is not a percentage from 1%% to 100%%; write one such as 50%%", text)
	}
	*p = percentage(n)
	return nil
}

func (p *percentage) String() string { return fmt.Sprintf("%d%%", int(*p)) }
func (p *percentage) Type() string   { return "PERCENT" }

// factor is a whole number from 1 to a million.
type factor uint64

func (n *factor) Set(text string) error {
	v, err := strconv.ParseUint(strings.TrimSpace(text), 10, 64)
	if err != nil || v < 1 || v > 1e6 {
		return fmt.Errorf("%q is not a whole number from 1 to 1000000", text)
	}
	*n = factor(v)
	return nil
}

func (n *factor) String() string { return strconv.FormatUint(uint64(*n), 10) }
func (n *factor) Type() string   { return "N" }

// span is a duration of at least min.
type span struct {
	time.Duration
	min time.Duration
}

func (s *span) Set(text string) error {
	d, err := time.ParseDuration(strings.TrimSpace(text))
	if err != nil {
		return fmt.Errorf("%q is not a duration; write one such as 500ms, 2s or 1m", text)
	}
	if d < s.min {
		return fmt.Errorf("%q is too short; the minimum is %s", text, s.min)
	}
	s.Duration = d
	return nil
}

func (s *span) Type() string { return "DURATION" }

// choice is one of several words.
type choice struct {
	word  string
	among []string
}

func (c *choice) Set(text string) error {
	for _, w := range c.among {
		if strings.EqualFold(w, strings.TrimSpace(text)) {
			c.word = w
			return nil
		}
	}
	return fmt.Errorf("%q is none of %s", text, strings.Join(c.among, ", "))
}

func (c *choice) String() string { return c.word }
func (c *choice) Type() string   { return strings.Join(c.among, "|") }

// restriction is a list of mount(8) options by which a mount forbids things.
type restriction string

func (r *restriction) Set(text string) error {
	for _, w := range strings.Split(text, ",") {
		if w = strings.TrimSpace(w); w != "" && w != "nosuid" && w != "nodev" && w != "noexec" {
			return fmt.Errorf("%q is none of nosuid, nodev, noexec", w)
		}
	}
	*r = restriction(strings.ReplaceAll(text, " ", ""))
	return nil
}

func (r *restriction) words() []string { return strings.Split(string(*r), ",") }
func (r *restriction) String() string  { return string(*r) }
func (r *restriction) Type() string    { return "FLAGS" }
