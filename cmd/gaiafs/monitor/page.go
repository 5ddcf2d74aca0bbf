package monitor

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"net/http"
	"regexp"
	"strings"
)

//go:embed page.html
var pageHTML string

// livePage is the live page. Its content security policy makes sure that it loads nothing from elsewhere.
type livePage struct{ policy string }

func newPage() *livePage {
	policy := []string{"default-src 'none'", "connect-src 'self'", "base-uri 'none'", "form-action 'none'",
		"frame-ancestors 'none'", "img-src data:"}
	for _, element := range []string{"script", "style"} {
		inside := regexp.MustCompile(`(?s)<` + element + `>(.*?)</` + element + `>`).FindStringSubmatch(pageHTML)
		sum := sha256.Sum256([]byte(inside[1]))
		policy = append(policy, element+"-src 'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"'")
	}
	return &livePage{strings.Join(policy, "; ")}
}

// ServeHTTP implements http.Handler.
func (p *livePage) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = w.Write([]byte(pageHTML)) // the client has gone
}
