package fs

import (
	"testing"

	"github.com/hanwen/go-fuse/v2/posixtest"
)

// lockTest tests that a lock of one descriptor excludes another descriptor of the same process. fcntl locks do not do
// that, so the test fails on every Linux filesystem.
const lockTest = "FcntlFlockLocksFile"

func TestPosix(t *testing.T) {
	for name, test := range posixtest.All {
		if name == lockTest {
			continue
		}
		t.Run(name, func(t *testing.T) {
			everyMode(t, func(t *testing.T, s *scene) { test(t, s.mnt) })
		})
	}
}
