package fs

// LeaveOutCureForTesting turns the cure of kernel_pages.go off, so that readers may get old bytes for good. With it,
// tests show that they would notice.
func (o *Options) LeaveOutCureForTesting() { o.withoutCure = true }
