// Package monitor shows a mount to Prometheus and to browsers.
//
// A Server listens on one address of TCP. /metrics has the figures in Prometheus's text format, /status.json the
// document of `gaiafs status --json`, and / a page that draws that document and asks for it again every second. All
// three come from the same status.
//
// # Who may ask
//
// Without a token a Server listens on loopback only, where every user of the machine can connect: it tells what any
// user may know, which is everything but the names of files, and who uses what. It answers only where the request names
// it by a loopback address or localhost, so that no web page can ask for it under a name of its own. With a token
// everything but the page itself, which has no figures in it, needs the token, and the document is the one that the
// owner of the mount gets.
//
// # Limits
//
// Clients are not trusted: connections, headers, times and methods are bounded, and all who ask within a quarter of a
// second get one snapshot, so that nobody has the daemon work much.
package monitor
