package fs

// LeaveOutCureForTesting makes a mount on which a reader may get old bytes for good, see kernel_pages.go: tests show
// with it that they would notice.
func (o *Options) LeaveOutCureForTesting() { o.withoutCure = true }
