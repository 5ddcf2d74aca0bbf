package monitor

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"github.com/gaiafs/gaiafs/pagecache"
)

const (
	// mostConnections bounds the connections of all clients. Further connections wait.
	mostConnections = 64
	// mostHeader bounds the header of a request, in bytes.
	mostHeader = 16 << 10
	// requestTime is how long a client may take to send a request, answerTime to read the answer, idleTime to send the
	// next request.
	requestTime, answerTime, idleTime = 5 * time.Second, 20 * time.Second, 30 * time.Second
	// freshness is the maximum age of an answer.
	freshness = 250 * time.Millisecond
)

// Snapshot is the state of a mount at one moment.
type Snapshot struct {
	// Version is the daemon's. Started is when it began.
	Version string
	Started time.Time
	// Sessions is the number of connections of client libraries. Mappings is the number of their mappings.
	Sessions, Mappings int
	// Requests has the latencies of the kernel's requests, by kind.
	Requests map[string]pagecache.Latency
	pagecache.Status
	// Document is the content of /status.json. It is marshalled to JSON.
	Document any
}

// Options configures a Server. Snapshot is required, and may be called from any goroutine.
type Options struct {
	// Address is where to listen. Without a Token it must be a loopback address.
	Address *net.TCPAddr
	Token   []byte
	// Snapshot describes the mount. It is called once for all requests within freshness.
	Snapshot func() Snapshot
	Log      *slog.Logger
}

// Server answers requests.
type Server struct {
	http     http.Server
	log      *slog.Logger
	listener net.Listener
	served   chan struct{} // closed when Serve has ended; nil before it
	access   access
	page     *livePage
	take     func() Snapshot

	mu   sync.Mutex // held while a snapshot is taken
	last Snapshot   // protected by mu
	at   time.Time  // when last was taken; protected by mu
}

// Listen binds the address. Connections wait there until Serve. Its errors say what to do.
func Listen(o Options) (*Server, error) {
	if len(o.Token) == 0 && !o.Address.IP.IsLoopback() {
		return nil, fmt.Errorf("%s can be reached from other machines and needs a token", o.Address)
	}
	l, err := net.ListenTCP("tcp", o.Address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return nil, fmt.Errorf("the metrics cannot be served at %s: another program listens there, which "+
			"'ss -ltnp sport = :%d' shows; choose another port with --metrics", o.Address, o.Address.Port)
	}
	if err != nil {
		return nil, fmt.Errorf("the metrics cannot be served at %s: %w; choose another address with --metrics",
			o.Address,
			err)
	}
	s := &Server{
		listener: netutil.LimitListener(l, mostConnections), log: o.Log, access: newAccess(o.Token),
		page: newPage(), take: o.Snapshot,
	}
	s.http = http.Server{
		Handler:           s.handler(o.Log),
		ReadHeaderTimeout: requestTime,
		ReadTimeout:       requestTime,
		WriteTimeout:      answerTime,
		IdleTimeout:       idleTime,
		MaxHeaderBytes:    mostHeader,
		ErrorLog:          slog.NewLogLogger(o.Log.Handler(), slog.LevelDebug),
	}
	return s, nil
}

// Serve starts to answer, in a goroutine.
func (s *Server) Serve() {
	s.served = make(chan struct{})
	go func() {
		defer close(s.served)
		if err := s.http.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("the metrics are not served any more", "error", err)
		}
	}()
}

// Address returns where the Server listens.
func (s *Server) Address() string { return s.listener.Addr().String() }

// Close ends all connections and returns when nothing is served any more. Call it once.
func (s *Server) Close() {
	_ = s.http.Close() // it does not matter how a connection ends
	_ = s.listener.Close()
	if s.served != nil {
		<-s.served
	}
}

// snapshot returns a snapshot no older than freshness.
func (s *Server) snapshot() *Snapshot {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at.IsZero() || time.Since(s.at) > freshness {
		s.last = s.take()
		s.at = time.Now()
	}
	last := s.last
	return &last
}

func (s *Server) handler(log *slog.Logger) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), collector{s.snapshot})
	figures := promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelError),
	})
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.guarded(figures))
	mux.Handle("GET /status.json", s.guarded(http.HandlerFunc(s.document)))
	mux.Handle("GET /{$}", s.page)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Cache-Control":           "no-store",
			"Content-Security-Policy": s.page.policy,
			"Referrer-Policy":         "no-referrer",
			"X-Content-Type-Options":  "nosniff",
			"X-Frame-Options":         "DENY",
		} {
			w.Header().Set(name, value)
		}
		mux.ServeHTTP(w, r)
	})
}

// guarded lets authorised requests pass.
func (s *Server) guarded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if code, err := s.access.check(r); err != nil {
			if code == http.StatusUnauthorized {
				w.Header().Set("WWW-Authenticate", `Bearer realm="gaiafs"`)
			}
			http.Error(w, err.Error(), code)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func (s *Server) document(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(s.snapshot().Document) // the client has gone
}
