package shortage

import (
	"fmt"
	"strings"
	"syscall"
)

// Kind says why an extent gets no memory. Picture.Text makes a sentence of it for the whole request.
type Kind int

// The kinds.
const (
	OverShare   Kind = iota // the user may not map more
	OverMaximum             // the tenant may not own more
	NoRoom                  // no further extent can leave
	UsedOutside             // programs outside of gaiafs use the device's memory
	TooSlow                 // memory that could make room is still in use
)

func (Kind) Error() string { return "there is no memory" }
func (Kind) Unwrap() error { return syscall.ENOMEM }

// Text says why a request for so many bytes fails. what names the request, and least is the device's smallest
// allocation.
func (p *Picture) Text(why Kind, what string, need, least int64) string {
	text := fmt.Sprintf("%s needs %s of device %d", what, size(need), p.Device)
	switch why {
	case OverShare:
		return text + fmt.Sprintf(", and user %d may map no more than %s of its %s and maps %s already%s; unmap something, or "+
			"raise user-share with 'gaiafs set'", p.User, size(p.Share), size(p.Budget), size(p.user),
			inBrackets(p.programs(p.ofUser)))
	case OverMaximum:
		return text + fmt.Sprintf(", and %s may own no more than %s (the maximum of tenant %s) and has %s in use%s; unmap "+
			"something, or change the maximum with 'gaiafs set MOUNTPOINT tenants=FILE'", p.Tenant, size(p.Most), p.Tenant,
			size(p.tenant), inBrackets(p.programs(p.ofTenant)))
	case UsedOutside:
		return text + fmt.Sprintf(", which has no memory left although only %s of its %s are used here: other programs use "+
			"the GPU's memory; end one of them, or lower gpu-memory with 'gaiafs set'", size(p.Used-p.got), size(p.Budget))
	case TooSlow:
		return text + ", and memory that could make room is still being copied from for programs on the CPU: the device is " +
			"slow, or hangs"
	}
	helps := "unmap something"
	if p.pinned > 0 {
		helps += ", take pins back with 'gaiafs unpin'"
	}
	if p.guaranteed+p.Unused > 0 {
		helps += ", lower the guarantees with 'gaiafs set MOUNTPOINT tenants=FILE'"
	}
	return text + fmt.Sprintf(", and only %s of its %s can be had: %s; %s, or raise gpu-memory with 'gaiafs set'",
		size(min(p.had+p.Budget-p.Used-p.Unused, need-least)), size(p.Budget), strings.Join(p.Who(), ", "), helps)
}

func inBrackets(words []string) string {
	if len(words) == 0 {
		return ""
	}
	return " (" + strings.Join(words, ", ") + ")"
}
