package gaiafs

import (
	"context"
	"encoding/binary"
	"strings"
)

// Set changes settings of a mount in use: all of them or, on error, none. Each setting is given as NAME=VALUE. Set
// returns the values of all settings that can be changed: a JSON document, see docs/status.md. Without settings it
// changes nothing. The value of tenants and priorities is the path of a file, which only names it, a newline and the
// text of the file: the daemon opens no file for a client. Errors: EPERM for users other than root and the one who
// mounted, EINVAL for an unknown setting or a bad value, ENOSYS as in Inspect, and those of Status.
func Set(ctx context.Context, mountpoint string, settings ...string) ([]byte, error) {
	doc, err := set(ctx, mountpoint, settings)
	return doc, during("set", err)
}

func set(ctx context.Context, mountpoint string, settings []string) ([]byte, error) {
	c, token, err := connectTo(mountpoint)
	if err != nil {
		return nil, err
	}
	defer c.release()
	return c.document(ctx, typeSet, setBody(token, settings))
}

// setBody encodes the settings one after another, each ended by a zero byte.
func setBody(token [16]byte, settings []string) []byte {
	text := ""
	for _, s := range settings {
		text += strings.ReplaceAll(s, "\x00", "") + "\x00"
	}
	b := binary.LittleEndian.AppendUint32(token[:], uint32(len(text)))
	return append(append(b, 0, 0, 0, 0), text...)
}
