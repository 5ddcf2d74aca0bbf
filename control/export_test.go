package control

// SetPrivileged says which users have no limits of their own.
func (o *Options) SetPrivileged(is func(uid uint32) bool) { o.privileged = is }

// StatusReserve is how many connections beyond MaxSessions the privileged have.
const StatusReserve = statusReserve
