package monitor

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
)

// leastToken and mostToken bound the length of a token.
const (
	leastToken = 16
	mostToken  = 4096
)

// Address checks an address to listen on, HOST:PORT, and reports whether only this machine can reach it. The host may
// be a name; without a host it means every address of the machine.
func Address(text string) (address *net.TCPAddr, loopback bool, err error) {
	if !strings.Contains(text, ":") {
		return nil, false, fmt.Errorf("%q has no port; write an address such as 127.0.0.1:9400", text)
	}
	address, err = net.ResolveTCPAddr("tcp", text)
	if err != nil {
		return nil, false, fmt.Errorf("%q is not an address; write one such as 127.0.0.1:9400: %w", text, err)
	}
	return address, address.IP.IsLoopback(), nil
}

// ReadToken reads the token from a file. It ignores surrounding space.
func ReadToken(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("the token cannot be read: %w", err)
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, mostToken+1))
	if err != nil {
		return nil, fmt.Errorf("the token cannot be read: %w", err)
	}
	token := bytes.TrimSpace(text)
	odd := func(r rune) bool { return r <= ' ' || r > '~' }
	if len(token) < leastToken || len(token) > mostToken || bytes.ContainsFunc(token, odd) {
		return nil, fmt.Errorf("%s has no token: a token is one word of at least %d letters and digits, for example from "+
			"'head -c 24 /dev/urandom | base64'", path, leastToken)
	}
	return token, nil
}

// errNoToken and errForeign say why a request is refused.
var (
	errNoToken = errors.New("this needs a token: Authorization: Bearer TOKEN")
	errForeign = errors.New("use the address, 127.0.0.1 or localhost, in the URL")
)

// access decides which requests are answered.
type access struct {
	// token is the hash of the token, all zeros if none is needed.
	token [sha256.Size]byte
	needs bool
}

func newAccess(token []byte) access {
	return access{token: sha256.Sum256(token), needs: len(token) > 0}
}

// check returns the error for a request that is refused, and its status code.
func (a *access) check(r *http.Request) (int, error) {
	if a.needs {
		scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
		// comparing hashes takes the same time for every guess
		given := sha256.Sum256([]byte(strings.TrimSpace(token)))
		if !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(given[:], a.token[:]) != 1 {
			return http.StatusUnauthorized, errNoToken
		}
		return 0, nil
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	if ip := net.ParseIP(host); strings.EqualFold(host, "localhost") || ip != nil && ip.IsLoopback() {
		return 0, nil
	}
	return http.StatusForbidden, errForeign
}
