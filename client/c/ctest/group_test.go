package ctest

import (
	"testing"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

// TestGroups releases groups on mounts, and kills a writer half-way.
func TestGroups(t *testing.T) {
	for build := range builds {
		t.Run(build, func(t *testing.T) {
			client := compile(t, "group", build)
			for scenario, forks := range map[string]string{"together": "together", "killed": "forks"} {
				t.Run(scenario, func(t *testing.T) {
					skipForks(t, build, forks)
					m := testmount.Start(t, testmount.Options{Poison: true, Devices: 2})
					d := &daemon{t: t, dir: m.Dir}
					d.run(client, scenario, m.Dir)
				})
			}
		})
	}
}
