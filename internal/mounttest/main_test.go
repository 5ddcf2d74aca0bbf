package mounttest

import (
	"fmt"
	"os"
	"testing"

	"github.com/gaiafs/gaiafs/internal/testmount"
)

func TestMain(m *testing.M) {
	testmount.Main()
	if os.Getenv(programVariable) != "" {
		if err := serveProgram(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}
