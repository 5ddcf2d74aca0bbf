package cuda

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// driver returns the functions of the fake.
func (g *fake) driver() *driver {
	d := &driver{}
	g.bindDevice(d)
	g.bindStreams(d)
	g.bindMemory(d)
	g.bindMapping(d)
	return d
}

func (g *fake) bindDevice(d *driver) {
	d.init = func(uint32) result { return g.call("cuInit", false, func() result { return success }) }
	d.driverGetVersion = func(v *int32) result { *v = g.version; return success }
	d.getErrorString = func(r result, text **byte) result {
		if r == unknown {
			return invalidValue
		}
		words := append([]byte("what the driver says"), 0)
		*text = &words[0]
		return success
	}
	d.deviceGetCount = func(n *int32) result {
		return g.call("cuDeviceGetCount", false, func() result { *n = g.count; return success })
	}
	d.deviceGet = func(h *deviceHandle, ordinal int32) result { *h = deviceHandle(ordinal); return success }
	d.deviceGetName = func(name *byte, n int32, _ deviceHandle) result {
		copy(unsafe.Slice(name, n), "Fake GPU\x00")
		return success
	}
	d.deviceGetUUID = func(uuid *[16]byte, _ deviceHandle) result { uuid[0] = 7; return success }
	d.deviceTotalMem = func(n *uint64, _ deviceHandle) result { *n = g.total; return success }
	d.deviceGetAttribute = func(v *int32, attribute int32, _ deviceHandle) result {
		*v = g.attributes[attribute]
		return success
	}
	d.deviceCanAccessPeer = func(can *int32, device, peer deviceHandle) result {
		return g.call("cuDeviceCanAccessPeer", false, func() result {
			if *can = 0; device != peer && g.linked {
				*can = 1
			}
			return success
		})
	}
	d.devicePrimaryCtxRetain = func(ctx *contextHandle, device deviceHandle) result {
		return g.call("cuDevicePrimaryCtxRetain", false,
			func() result { g.retained++; *ctx = contextHandle(device) + 1; return success })
	}
	d.devicePrimaryCtxRelease = func(deviceHandle) result {
		return g.call("cuDevicePrimaryCtxRelease", false, func() result { g.retained--; return success })
	}
	d.ctxSetCurrent = func(ctx contextHandle) result {
		return g.call("cuCtxSetCurrent", false, func() result { g.current[unix.Gettid()] = ctx; return success })
	}
	d.memGetInfo = func(free, total *uint64) result {
		*free, *total = g.total-5, g.total
		return success
	}
	d.moduleLoadDataEx = func(m *moduleHandle, _ *byte, _ uint32, _ *int32, _ *unsafe.Pointer) result {
		return g.call("cuModuleLoadDataEx", true, func() result { *m = 1; return success })
	}
	d.moduleUnload = func(moduleHandle) result { return success }
	d.moduleGetFunction = func(f *functionHandle, _ moduleHandle, name *byte) result {
		return g.call("cuModuleGetFunction", true, func() result {
			*f = map[string]functionHandle{"gaiafs_digests": 1, "gaiafs_modified": 2, "gaiafs_patch": 3,
				"gaiafs_scatter": 4, "gaiafs_gather": 5, "gaiafs_refresh": 6}[cString(name)]
			if *f == 0 {
				return invalidValue
			}
			return success
		})
	}
	d.launchKernel = func(f functionHandle, blocks, _, _, _, _, _, _ uint32, s streamHandle, params,
		_ *unsafe.Pointer) result {
		return g.call("cuLaunchKernel", true, func() result {
			n := map[functionHandle]int{1: 5, 2: 6, 3: 2, 4: 2, 5: 2, 6: 5}[f]
			words := make([]uint64, n) // copied when the call returns, as by the real one
			for i, p := range unsafe.Slice(params, n) {
				words[i] = *(*uint64)(p)
			}
			return g.queue(s, func() result { return g.kernel(f, blocks, words) })
		})
	}
}

func (g *fake) bindStreams(d *driver) {
	d.streamCreate = func(s *streamHandle, _ uint32) result {
		return g.call("cuStreamCreate", true, func() result {
			*s = streamHandle(g.id(0))
			g.streams[*s] = &fakeStream{device: deviceHandle(g.current[unix.Gettid()] - 1)}
			return success
		})
	}
	d.streamDestroy = func(s streamHandle) result {
		return g.call("cuStreamDestroy", true, func() result { delete(g.streams, s); return success })
	}
	d.streamSynchronize = func(s streamHandle) result {
		return g.call("cuStreamSynchronize", true, func() result { return g.drain(s, len(g.streams[s].queue)) })
	}
	d.eventCreate = func(e *eventHandle, _ uint32) result {
		return g.call("cuEventCreate", true, func() result {
			*e = eventHandle(g.id(0))
			g.events[*e] = fakeEvent{}
			return success
		})
	}
	d.eventDestroy = func(e eventHandle) result {
		return g.call("cuEventDestroy", true, func() result { delete(g.events, e); return success })
	}
	d.eventRecord = func(e eventHandle, s streamHandle) result {
		return g.call("cuEventRecord", true, func() result {
			g.events[e] = fakeEvent{stream: s, ahead: len(g.streams[s].queue)}
			return success
		})
	}
	d.eventQuery = func(e eventHandle) result {
		return g.call("cuEventQuery", true, func() result {
			x := g.events[e]
			if !x.seen {
				x.seen = true
				g.events[e] = x
				return notReady
			}
			return g.drain(x.stream, x.ahead)
		})
	}
	d.eventSynchronize = func(e eventHandle) result {
		return g.call("cuEventSynchronize", true,
			func() result { return g.drain(g.events[e].stream, g.events[e].ahead) })
	}
}

func (g *fake) bindMemory(d *driver) {
	d.memAlloc = func(a *address, n uintptr) result {
		return g.call("cuMemAlloc", true, func() result {
			*a = address(g.id(n))
			g.device[*a] = g.anonymous(n)
			return success
		})
	}
	d.memFree = func(a address) result {
		return g.call("cuMemFree", true, func() result { return forget(g.device, a) })
	}
	d.memHostAlloc = func(p *unsafe.Pointer, n uintptr, _ uint32) result {
		return g.call("cuMemHostAlloc", true, func() result {
			b := g.anonymous(n)
			*p = unsafe.Pointer(&b[0])
			g.host[hostAddress(*p)] = b
			return success
		})
	}
	d.memFreeHost = func(p unsafe.Pointer) result {
		return g.call("cuMemFreeHost", true, func() result { return forget(g.host, hostAddress(p)) })
	}
	d.memHostRegister = func(p unsafe.Pointer, n uintptr, flags uint32) result {
		return g.call("cuMemHostRegister", true, func() result {
			if flags != hostPortable|hostReadOnly || uintptr(p)%pageSize != 0 || n%pageSize != 0 {
				return invalidValue
			}
			g.host[hostAddress(p)] = unsafe.Slice((*byte)(p), n)
			g.files[hostAddress(p)] = g.host[hostAddress(p)]
			return success
		})
	}
	d.memHostUnregister = func(p unsafe.Pointer) result {
		return g.call("cuMemHostUnregister", true, func() result {
			if _, ok := g.host[hostAddress(p)]; !ok {
				return invalidValue
			}
			delete(g.host, hostAddress(p))
			delete(g.files, hostAddress(p))
			return success
		})
	}
	d.memcpyHtoDAsync = func(to, from address, n uintptr, s streamHandle) result {
		return g.call("cuMemcpyHtoDAsync", true, func() result {
			g.uploaded += int(n)
			if g.reads(from, n) {
				return invalidValue
			}
			return g.queue(s, func() result { return g.move(to, from, n) })
		})
	}
	d.memcpyDtoHAsync = func(to, from address, n uintptr, s streamHandle) result {
		return g.call("cuMemcpyDtoHAsync", true, func() result {
			return g.queue(s, func() result { return g.move(to, from, n) })
		})
	}
	d.memcpyDtoDAsync = func(to, from address, n uintptr, s streamHandle) result {
		return g.call("cuMemcpyDtoDAsync", true, func() result {
			return g.queue(s, func() result {
				if !g.reaches(g.streams[s].device, to, n) || !g.reaches(g.streams[s].device, from, n) {
					return illegalAddress
				}
				return g.move(to, from, n)
			})
		})
	}
	d.memcpy2DAsync = func(rows *copyRows, s streamHandle) result {
		return g.call("cuMemcpy2DAsync", true, func() result {
			x := *rows // read before the call returns
			for _, side := range []copySide{x.from, x.to} {
				if side.pitch < x.width || side.pitch > mostPitch || side.x != 0 || side.y != 0 || side.array != 0 {
					return invalidValue
				}
			}
			return g.queue(s, func() result { return g.moveRows(&x) })
		})
	}
	d.memcpyBatchAsync = func(to, from *address, sizes *uintptr, count uintptr, _ *copyAttributes, _ *uintptr,
		_ uintptr, _ *uintptr, s streamHandle) result {
		return g.call("cuMemcpyBatchAsync", true, func() result {
			tos := append([]address{}, unsafe.Slice(to, count)...)
			froms := append([]address{}, unsafe.Slice(from, count)...)
			ns := append([]uintptr{}, unsafe.Slice(sizes, count)...)
			for i := range ns {
				if g.reads(froms[i], ns[i]) {
					return invalidValue
				}
			}
			return g.queue(s, func() result {
				for i := range ns {
					if r := g.move(tos[i], froms[i], ns[i]); r != success {
						return r
					}
				}
				return success
			})
		})
	}
	d.memsetD8Async = func(a address, value uint8, n uintptr, s streamHandle) result {
		return g.call("cuMemsetD8Async", true, func() result {
			return g.queue(s, func() result {
				p := find(a, n, g.device)
				if p == nil {
					return illegalAddress
				}
				for i := range p {
					p[i] = value
				}
				return success
			})
		})
	}
}

func (g *fake) bindMapping(d *driver) {
	d.memGetGranularity = func(n *uintptr, prop *allocationProp, _ int32) result {
		if prop.kind != 1 || prop.handleTypes != handlePOSIX {
			return invalidValue
		}
		*n = 2 << 20
		return success
	}
	d.memCreate = func(m *memoryHandle, n uintptr, _ *allocationProp, _ uint64) result {
		return g.call("cuMemCreate", true, func() result {
			fd, err := unix.MemfdCreate("fake", unix.MFD_CLOEXEC)
			if err != nil || unix.Ftruncate(fd, int64(n)) != nil {
				return outOfMemory
			}
			*m = memoryHandle(g.id(0))
			g.handles[*m] = &fakeHandle{fd: fd, size: n, kept: true}
			return success
		})
	}
	d.memRelease = func(m memoryHandle) result {
		return g.call("cuMemRelease", true, func() result {
			h := g.handles[m]
			if h == nil || !h.kept || h.maps > 0 {
				return invalidValue
			}
			delete(g.handles, m)
			_ = unix.Close(h.fd)
			return success
		})
	}
	d.memAddressReserve = func(a *address, n, _ uintptr, _ address, _ uint64) result {
		return g.call("cuMemAddressReserve", true, func() result {
			*a = address(g.id(n))
			g.reserved[*a] = n
			return success
		})
	}
	d.memAddressFree = func(a address, n uintptr) result {
		return g.call("cuMemAddressFree", true, func() result {
			if _, mapped := g.device[a]; mapped || g.reserved[a] != n {
				return invalidValue
			}
			delete(g.reserved, a)
			return success
		})
	}
	mapped := map[address]*fakeHandle{}
	d.memMap = func(a address, n, offset uintptr, m memoryHandle, _ uint64) result {
		return g.call("cuMemMap", true, func() result {
			h := g.handles[m]
			if h == nil || offset != 0 || n != h.size || g.reserved[a] != n {
				return invalidValue
			}
			mapped[a] = h
			h.maps++
			return success
		})
	}
	d.memSetAccess = func(a address, n uintptr, desc *accessDesc, count uintptr) result {
		return g.call("cuMemSetAccess", true, func() result {
			h := mapped[a]
			if h == nil || count != 1 || desc.flags != accessReadWrite {
				return invalidValue
			}
			if g.access[a] == nil {
				g.access[a] = map[int32]bool{}
			}
			g.access[a][desc.location.id] = true
			if g.device[a] != nil { // another GPU's access
				return success
			}
			p, err := unix.Mmap(h.fd, 0, int(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return outOfMemory
			}
			g.device[a] = p
			return success
		})
	}
	d.memUnmap = func(a address, _ uintptr) result {
		return g.call("cuMemUnmap", true, func() result {
			h := mapped[a]
			if h == nil {
				return invalidValue
			}
			delete(mapped, a)
			delete(g.access, a)
			h.maps--
			if g.device[a] == nil { // no access was given
				return success
			}
			return forget(g.device, a)
		})
	}
	d.memExportToHandle = func(fd *int32, m memoryHandle, _ int32, _ uint64) result {
		return g.call("cuMemExportToShareableHandle", true, func() result {
			n, err := unix.FcntlInt(uintptr(g.handles[m].fd), unix.F_DUPFD, 3)
			if err != nil {
				return invalidValue
			}
			*fd = int32(n)
			return success
		})
	}
}
