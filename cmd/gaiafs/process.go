package main

import (
	"encoding/json"
	"fmt"

	gaiafs "github.com/gaiafs/gaiafs/client/go"
	"github.com/gaiafs/gaiafs/control"
)

// A daemon knows only the number that its process has in its own PID namespace. If it runs in a container, that number
// belongs to another process here.

// statusFrom asks the daemon for its status. It replaces the daemon's process ID by the one in this PID namespace, or
// by 0 if it has none here.
func statusFrom(where string) ([]byte, error) {
	doc, err := gaiafs.Status(where)
	if err != nil {
		return nil, err
	}
	var s struct {
		Mount mountStatus `json:"mount"`
	}
	if err := json.Unmarshal(doc, &s); err != nil {
		return doc, nil // whoever reads the document says so
	}
	pid, listens := control.ListenerOf(s.Mount.Socket)
	if !listens || pid == s.Mount.PID {
		return doc, nil
	}
	return renumbered(doc, pid)
}

// renumbered returns a status with another process ID. Everything else stays, also what this version does not know.
func renumbered(doc []byte, pid int) ([]byte, error) {
	var all, mount map[string]json.RawMessage
	if err := json.Unmarshal(doc, &all); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(all["mount"], &mount); err != nil {
		return nil, err
	}
	var err error
	if mount["pid"], err = json.Marshal(pid); err != nil {
		return nil, err
	}
	if all["mount"], err = json.Marshal(mount); err != nil {
		return nil, err
	}
	return json.Marshal(all)
}

// processText names a process by its ID. 0 stands for one in a container whose processes cannot be seen.
func processText[N int | uint32](pid N) string {
	if pid == 0 {
		return "a process in another container"
	}
	return fmt.Sprintf("process %d", pid)
}
