// Package monitor shows a mount to Prometheus and to browsers.
//
// A Server listens on one TCP address. /metrics has the figures in Prometheus's text format, /status.json is the
// document of `gaiafs status --json`, and / is a page that draws that document and polls it every second. All three
// show the same status.
//
// # Access
//
// Without a token, a Server listens on loopback only, where every user of the machine can connect. It shows what any
// user may know: everything except the names of files, and who uses what. It answers only if the request names it by a
// loopback address or localhost, so no web page can reach it under a host name of its own. With a token, everything
// except the page itself requires the token, and the document is the one that the owner of the mount gets. The page has
// no figures in it.
//
// # Limits
//
// Clients are not trusted: connections, headers, times and methods are bounded. All requests within a quarter of a
// second get the same snapshot, so requests cannot load the daemon.
package monitor
