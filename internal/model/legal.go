package model

// Legal reports whether a step makes sense now.
func (m *Model) Legal(s Step) bool {
	l := m.layout
	limit := int64(l.Pages) * PageSize
	if s.Off < 0 || s.Off > limit || s.Op.hasRange() && (s.Len <= 0 || s.Len > limit-s.Off) {
		return false
	}
	if s.Op.byCPU() {
		return l.IsCPU(s.Client) && m.legalOnCPU(s, limit)
	}
	if l.IsCPU(s.Client) {
		return false
	}
	mp, rel := m.mappings[s.Client], m.releases[s.Client]
	start, end := m.within(s)
	switch s.Op {
	case Map:
		return mp == nil && s.Off%PageSize == 0
	case Evict, Done:
		return true
	case View:
		_, has := m.views[s.Client]
		return !has
	case Look, Unview:
		_, has := m.views[s.Client]
		return has
	case Store, Load:
		return mp != nil && (mp.writable || s.Op == Load) && m.reachable(s)
	case Group:
		return mp != nil && rel == nil && mp.writable && !mp.movable && m.reachable(s)
	case Use:
		return mp != nil && rel == nil && mp.movable && start < end
	case Drop, Finish:
		return rel != nil
	case Unmap, Kill, Peek:
		return mp != nil && rel == nil
	case Release, Publish:
		return mp != nil && rel == nil && mp.writable && start < end
	default:
		return mp != nil && rel == nil && start < end
	}
}

func (m *Model) legalOnCPU(s Step, limit int64) bool {
	end := s.Off + s.Len
	switch s.Op {
	case MapStore, Punch, Flush, Reclaim, SourceWrite, SourcePunch, SourceClone, SourceSnapshot:
		return end <= m.size
	case Read, DirectRead, SeekRead, CopyOut, PunchRest:
		return s.Off < m.size
	case Append, SourceAppend:
		return s.Len > 0 && m.size+s.Len <= limit
	case Copy:
		apart := s.From+s.Len <= s.Off || end <= s.From
		return apart && s.From >= 0 && s.From+s.Len <= m.size
	case SourceCollapse:
		return end < m.size && s.wholePages()
	case SourceInsert:
		return s.Off < m.size && m.size+s.Len <= limit && s.wholePages()
	}
	return true
}

func (s Step) wholePages() bool { return s.Off%PageSize == 0 && s.Len%PageSize == 0 }
