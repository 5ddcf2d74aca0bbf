package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gaiafs/gaiafs/bench/loopback"
	"github.com/gaiafs/gaiafs/control"
	"github.com/gaiafs/gaiafs/fs"
	"github.com/gaiafs/gaiafs/gpubackend"
	"github.com/gaiafs/gaiafs/gpubackend/emulated"
	"github.com/gaiafs/gaiafs/pagecache"
)

// environment is the variable that makes this program a daemon: a daemonJob in JSON.
const environment = "GAIAFS_BENCH_DAEMON"

// ready is what a daemon prints once its mount can be used.
const ready = "ready"

// daemonJob says what a daemon is to mount.
type daemonJob struct {
	// Loopback asks for go-fuse's loopback, with requests of MaxWrite bytes, instead of gaiafs.
	Loopback bool
	MaxWrite int

	Source, Mountpoint string
	// For gaiafs: the socket, and the emulated devices with their memory in bytes.
	Socket  string
	Devices int
	Memory  int64
}

// serveIfAsked serves a mount and does not return if this process was started to do so.
func serveIfAsked() {
	text, ok := os.LookupEnv(environment)
	if !ok {
		return
	}
	var j daemonJob
	err := json.Unmarshal([]byte(text), &j)
	if err == nil {
		stop, end := signal.NotifyContext(context.Background(), syscall.SIGTERM)
		signal.Ignore(syscall.SIGINT) // a Ctrl-C goes to the bench, which ends its daemons when it is done with them
		if j.Loopback {
			err = serveLoopback(stop, &j)
		} else {
			err = serveGaiafs(stop, &j)
		}
		end()
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serveLoopback(stop context.Context, j *daemonJob) error {
	server, err := loopback.Mount(j.Source, j.Mountpoint, j.MaxWrite)
	if err != nil {
		return err
	}
	fmt.Println(ready)
	context.AfterFunc(stop, func() { _ = unmount(j.Mountpoint) })
	server.Wait()
	return nil
}

// granter passes grants of the control server on to the mount.
type granter struct{ *control.Server }

func (g granter) Grant(src pagecache.Source) (fs.Grant, error) {
	x, err := g.Server.Grant(src)
	return fs.Grant(x), err
}

func (g granter) GrantStatus() (fs.Grant, error) {
	x, err := g.Server.GrantStatus()
	return fs.Grant(x), err
}

func serveGaiafs(stop context.Context, j *daemonJob) error {
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	var devices []gpubackend.Device
	for i := range j.Devices {
		d, err := emulated.New(emulated.Options{Ordinal: i, Memory: j.Memory})
		if err != nil {
			return err
		}
		devices = append(devices, d)
	}
	cache, err := pagecache.New(pagecache.Options{Devices: devices, Log: log})
	if err != nil {
		return err
	}
	server, err := control.Listen(control.Options{
		Socket: j.Socket,
		Cache:  control.ForCache(cache),
		Status: func() any { return cache.Status() },
		Log:    log,
	})
	if err != nil {
		return err
	}
	mount, err := fs.Mount(fs.Options{
		Source: j.Source, Mountpoint: j.Mountpoint, Cache: cache, Granter: granter{server}, Log: log,
	})
	if err != nil {
		return errors.Join(err, server.Close())
	}
	fmt.Println(ready)
	served := make(chan struct{})
	go func() {
		mount.Wait()
		close(served)
	}()
	select {
	case <-stop.Done():
	case <-served:
	}
	return errors.Join(server.Close(), cache.Close(context.Background()), unmountServer(mount, j.Mountpoint))
}

// unmountServer unmounts even where something still uses the mount: the bench is over.
func unmountServer(s *fs.Server, mountpoint string) error {
	if err := s.Unmount(); err != nil {
		if err := unmount(mountpoint); err != nil {
			return err
		}
		s.Wait()
	}
	return nil
}

// unmount takes a mount away even while programs use it. It is forced, so that their requests fail from now on; otherwise the
// daemon could not end before they do.
func unmount(mountpoint string) error {
	err := unix.Unmount(mountpoint, unix.MNT_DETACH|unix.MNT_FORCE)
	if err == unix.EPERM {
		return exec.Command("fusermount3", "-u", "-z", mountpoint).Run()
	}
	return err
}

// daemon is a running daemon.
type daemon struct {
	cmd        *exec.Cmd
	mountpoint string
	ended      chan struct{}
	stop       sync.Once
}

// startDaemon mounts and returns once the mount can be used.
func startDaemon(j *daemonJob) (*daemon, error) {
	text, err := json.Marshal(j)
	if err != nil {
		return nil, err
	}
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), environment+"="+string(text))
	cmd.Stderr = os.Stderr
	// It is not left behind where the bench is killed.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM, Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	d := &daemon{cmd: cmd, mountpoint: j.Mountpoint, ended: make(chan struct{})}
	lines := bufio.NewReader(out)
	first, _ := lines.ReadString('\n')
	go func() {
		_, _ = io.Copy(os.Stderr, lines)
		_ = cmd.Wait()
		close(d.ended)
	}()
	if first = strings.TrimSpace(first); first != ready {
		d.close()
		return nil, fmt.Errorf("mounting %s failed: %s", j.Mountpoint, first)
	}
	return d, nil
}

// close ends the daemon and takes its mount away whatever it does.
func (d *daemon) close() {
	d.stop.Do(func() {
		_ = d.cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-d.ended:
		case <-time.After(30 * time.Second):
			_ = d.cmd.Process.Kill()
			<-d.ended
		}
		_ = unmount(d.mountpoint) // EINVAL where the daemon did it, as it should
	})
}
